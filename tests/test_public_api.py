"""The public names: exactly these, each documented with an example that runs."""

import inspect

import pytest

import trainer as tr


NAMES = [
    "AbstractCallback",
    "AbstractLoss",
    "AbstractRule",
    "AbstractSampler",
    "AbstractSelector",
    "AbstractTransform",
    "AbstractUpdate",
    "AdaptiveSum",
    "Anneal",
    "Arrays",
    "At",
    "Call",
    "CompileReport",
    "Cycle",
    "Difference",
    "EMA",
    "Ensemble",
    "Evaluate",
    "Every",
    "Explanation",
    "FitResult",
    "GradNorm",
    "GradientBalance",
    "History",
    "JointUpdate",
    "LearningRateAnnealing",
    "Loader",
    "LossWarning",
    "MeanSquare",
    "Minimize",
    "NTKTrace",
    "NonfiniteError",
    "NonfiniteSteps",
    "Outcome",
    "Part",
    "Parts",
    "Plateau",
    "Preflight",
    "Preview",
    "Profile",
    "Project",
    "Random",
    "ReLoBRaLo",
    "RecompileError",
    "Report",
    "SWA",
    "Seen",
    "SoftAdapt",
    "StepInfo",
    "Stop",
    "Switch",
    "SwitchUpdate",
    "Target",
    "Threshold",
    "TraceError",
    "TrainState",
    "Trainer",
    "Uncertainty",
    "WeightedSum",
    "alternate",
    "ensemble",
    "explain",
    "piecewise",
    "preview",
    "profile",
    "switch_every",
]
WITHOUT_EXAMPLE = {
    "AbstractRule",
    "AbstractSelector",
    "AbstractTransform",
    "AbstractUpdate",
    "Explanation",
    "FitResult",
    "History",
    "NonfiniteError",
    "NonfiniteSteps",
    "Outcome",
    "Preflight",
    "Preview",
    "RecompileError",
    "Report",
    "Seen",
    "StepInfo",
    "Stop",
    "TraceError",
    "TrainState",
}


def test_the_public_names_are_these():
    names = [n for n, v in vars(tr).items() if not n.startswith("_")]
    public = [n for n in names if not inspect.ismodule(getattr(tr, n))]
    assert sorted(public) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_documented(name):
    value = getattr(tr, name)
    assert value.__doc__
    first = value.__doc__.splitlines()[0]
    assert first.endswith(".")
    assert ("Example:" in value.__doc__) or name in WITHOUT_EXAMPLE
    if inspect.isclass(value):
        for member, function in inspect.getmembers(value, inspect.isfunction):
            if not member.startswith("_") and function.__module__.startswith("trainer"):
                assert function.__doc__, f"{name}.{member}"
