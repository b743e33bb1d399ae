"""The family is found, plans what it should, and is right on a tiny random model."""

from opake import registry
from opake.checking.family import check_family


def test_the_family_is_listed_as_ours():
    (claim,) = [claim for claim in registry.listed() if claim.name == "helium"]
    assert (claim.source, claim.status) == ("opake-helium", "ok")


def test_the_family_is_right():
    outcome = check_family("helium")
    assert outcome.failures == []
