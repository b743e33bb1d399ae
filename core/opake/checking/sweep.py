"""Every causal language model of Transformers, tried on a tiny random model: which are right, and why the others not.

`python -m opake.checking.sweep --write` tries all of them on the installed Transformers and records the answers in
`opake/data/generic.json`, which `opake families list --all` reads. A model type that a plugin claims is tried with its
plugin. What a right answer means is written in `answer`; whether the file is still true is the tests' business.
"""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opake.checking.answers import Answer, Answers, record
from opake.checking.family import attributes, differences
from opake.checking.judge import PADDINGS, TOLERANCE, beside_padding, judged, loop_grads, vmap_grads
from opake.checking.tiny import tiny_batch, tiny_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SECONDS = 120.0
SEEDS = 4
LENGTH = 200


def model_types() -> list[str]:
    """The model types that `AutoModelForCausalLM` of the installed Transformers knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def answer(model_type: str, seconds: float = SECONDS) -> Answer:
    """Try one model type, for at most so many seconds of processor time.

    Proven means: with padding on the right, on the left and none, per-example gradients under vmap equal a loop over an
    unpatched copy within 5e-6, or are at most twice as far from float64 as that loop is; the loss outside transforms
    is the unpatched one; and `restore` leaves nothing behind.
    """
    try:
        with _limit(seconds), warnings.catch_warnings(), quiet():
            warnings.simplefilter("ignore")
            return _tried(tiny_model(model_type))
    except TimeoutError as error:
        return Answer(reason=told(error))
    except Exception as error:
        return Answer(reason=f"no tiny model: {told(error)}")


def told(error: BaseException) -> str:
    """One line: the kind of error, its text, and the deepest line of a Transformers modeling file that led there."""
    text = " ".join(str(error).split()) or "no text"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if Path(f.filename).name.startswith(("modeling_", "configuration_"))]
    place = f" ({Path(inside[-1].filename).name}, {inside[-1].name})" if inside else ""
    return f"{type(error).__name__}: {text[:LENGTH]}{'...' if len(text) > LENGTH else ''}{place}"


def _tried(stock: PreTrainedModel) -> Answer:
    from opake import hf
    from opake.patches import apply_model_patches, restore

    model, name = copy.deepcopy(stock), type(stock).__name__
    options = {"use_cache": False} if hf.takes_use_cache(model, type(model).forward) else {}
    own = _written_by_forward(copy.deepcopy(stock), options)
    notes = _deterministic(stock, model, options)
    before, errors = attributes(model), []
    for padding in PADDINGS:
        stage = f"{padding} padding, unpatched" if padding != "none" else "no padding, unpatched"
        try:
            batch = tiny_batch(padding=padding)
            wanted, loss = loop_grads(stock, batch), stock(**batch, **options).loss
            stage = stage.removesuffix(", unpatched")
            apply_model_patches(model)
            if not bool((model(**batch, **options).loss - loss).abs() <= TOLERANCE * loss.abs()):
                return Answer(name, reason=f"{stage}: another loss outside transforms")
            error, right, note = judged(vmap_grads(model, batch), wanted, stock, batch)
            if not right and padding == "left":
                error, right, note = beside_padding(model, stock, batch)
        except TimeoutError:
            raise
        except Exception as error:
            return Answer(name, reason=f"{stage}: {told(error)}")
        finally:
            restore(model)
        if not right:
            return Answer(name, reason=f"{stage}: relative error {error:.1e}, {note}")
        errors.append(error)
        notes += [note] if note else []
    left = [name for name in differences(before, attributes(model)) if name not in own]
    return Answer(name, max(errors), f"restore left {left[0]}" if left else "", "; ".join(dict.fromkeys(notes)))


def _written_by_forward(model: PreTrainedModel, options: Mapping[str, Any]) -> set[str]:
    """Attributes that the model's own forward leaves on its modules."""
    before = attributes(model)
    with contextlib.suppress(Exception):
        model(**tiny_batch(), **options)
    return set(differences(before, attributes(model)))


def _deterministic(stock: PreTrainedModel, model: PreTrainedModel, options: Mapping[str, Any]) -> list[str]:
    """Leave training mode if the loss depends on random numbers that no dropout probability switches off."""
    import torch

    def loss(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return stock(**tiny_batch(), **options).loss

    with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        first = loss(0)
        if any(loss(seed) != first for seed in range(1, SEEDS)):
            stock.eval()
            loss(0).backward()
            model.eval()
            return ["in eval mode, since training draws random numbers"]
    stock.train()
    return []


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so much processor time, where the system and the thread can."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds:.0f} s of processor time")

    before = signal.signal(signal.SIGPROF, over)
    # again and again: code on the way may take the first one for a failure of its own
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log messages of Transformers about a model that is thrown away a second later."""
    import logging as levels

    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(levels.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def main(arguments: list[str] | None = None) -> None:
    """Try the model types named, or all, and print their answers."""
    import argparse

    import torch
    import transformers

    parser = argparse.ArgumentParser(prog="python -m opake.checking.sweep", description=__doc__)
    parser.add_argument("model_type", nargs="*", help="default: all of the installed Transformers")
    parser.add_argument("--write", action="store_true", help="record the answers; for all model types only")
    options = parser.parse_args(arguments)
    if options.write and options.model_type:
        parser.error("--write records all model types; name none")
    answers = {}
    for name in options.model_type or model_types():
        answers[name] = found = answer(name)
        print(f"{name}: {found.reason or f'proven, {found.error:.1e}'}{found.note and f' ({found.note})'}", flush=True)
    print(f"{sum(found.proven for found in answers.values())} of {len(answers)} proven")
    if options.write:
        record(Answers(transformers.__version__, torch.__version__.partition("+")[0], answers))


if __name__ == "__main__":
    main()
