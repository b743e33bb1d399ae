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
from opake.checking.family import TOLERANCE, attributes, differences, loop_grads, relative_error, vmap_grads
from opake.checking.tiny import tiny_batch, tiny_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PADDINGS = ("right", "none", "left")
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
                error, right, note = _beside_padding(model, stock, batch)
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


def judged(
    got: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    stock: PreTrainedModel,
    batch: Mapping[str, torch.Tensor],
) -> tuple[float, bool, str]:
    """The error, whether it is that of a right answer, and in words if that is not plain from the number."""
    error = relative_error(got, wanted)
    if error <= TOLERANCE:
        return error, True, ""
    batches = [batch, *(tiny_batch(padding=padding) for padding in PADDINGS)]
    exact = _float64(stock)
    if stock.config._attn_implementation == "eager" and not _finite(exact, batches[-1]):
        return error, *_beside_sdpa(error, stock, batches)
    ours = _far(got, loop_grads(exact, batch))
    theirs = _own_error(stock, exact, batches)
    right = ours <= 2 * theirs < float("inf")
    return error, right, f"{ours:.0e} from float64, the unpatched loop {theirs:.0e}"


def _far(grads: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    return relative_error({name: grad.double() for name, grad in grads.items()}, exact)


def _beside_padding(
    model: PreTrainedModel, stock: PreTrainedModel, batch: Mapping[str, torch.Tensor]
) -> tuple[float, bool, str]:
    """The same with nothing predicted from padding: what attention answers a row that sees nothing is a convention."""
    real = _first_token_unlabelled(batch)
    error, right, note = judged(vmap_grads(model, real), loop_grads(stock, real), stock, real)
    said = "left padding: attention of a row that sees nothing differs from stock"
    return error, right, f"{said}; {note}" if note else said


def _first_token_unlabelled(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    labels = batch["labels"].clone()
    first = batch["attention_mask"].argmax(dim=1)
    labels[range(len(labels)), first] = -100
    return {**batch, "labels": labels}


def _own_error(stock: PreTrainedModel, exact: PreTrainedModel, batches: list[dict[str, torch.Tensor]]) -> float:
    """How far the unpatched loop is from float64 at worst; rounding is a matter of luck in each batch."""
    return max(_far(loop_grads(stock, batch), loop_grads(exact, batch)) for batch in batches)


def _beside_sdpa(error: float, stock: PreTrainedModel, batches: list[dict[str, torch.Tensor]]) -> tuple[bool, str]:
    """Where a mask of float64 is beyond the float32 softmax of eager attention: what the same model loses with SDPA.

    Who is no farther from the unpatched loop than that loop is from float64 is at most twice as far from float64.
    """
    try:
        other = tiny_model(copy.deepcopy(stock.config), attention="sdpa").train(stock.training)
    except ValueError:
        return False, "eager attention is not finite in float64, and the model has no other"
    theirs = _own_error(other, _float64(other), batches)
    return error <= theirs < float("inf"), f"the unpatched loop {theirs:.0e} from float64, with SDPA"


def _finite(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> bool:
    return all(bool(grad.isfinite().all()) for grad in loop_grads(model, batch).values())


def _float64(stock: PreTrainedModel) -> PreTrainedModel:
    exact = tiny_model(stock.config).double().train(stock.training)
    if getattr(exact.config, "_experts_implementation", None):
        # the usual grouped products know no float64
        exact.set_experts_implementation("eager")
    return exact


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
