"""LoRA fusion in place: PEFT layers of one model computed by the fused ops wherever that says the same thing.

PEFT's own state decides at every forward: what is switched, merged, dropped out or hooked after patching takes PEFT's
own code, and the reason is noted on the module.
"""
