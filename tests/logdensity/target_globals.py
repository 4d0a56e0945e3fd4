import pyro
import torch


def torch_globals() -> dict[str, object]:
    return {
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "random": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "torch validation": torch.distributions.Distribution._validate_args,
        "pyro validation": (
            pyro.distributions.is_validation_enabled(),
            pyro.infer.is_validation_enabled(),
            pyro.poutine.is_validation_enabled(),
        ),
        "parameters": sorted(pyro.get_param_store().keys()),
        "handlers": len(pyro.poutine.runtime._PYRO_STACK),
        "plates": list(pyro.poutine.runtime._DIM_ALLOCATOR._stack),
    }
