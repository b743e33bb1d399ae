"""opake for Nemotron: the family (`nemotron`), an extension of Command R (`cohere`), and the ops that both need."""
