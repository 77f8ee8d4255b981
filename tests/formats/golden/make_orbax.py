"""Make `orbax-0.12.8`: the same pytree with and without OCDBT, by four devices, and a step of Orbax's manager.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python make_orbax.py FOLDER    # with orbax-checkpoint and jax[cpu]

`expected.npz` has the values of "params"; bfloat16 as int16.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp


def normal(shape: tuple[int, ...], dtype: object = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.PRNGKey(0), shape).astype(dtype)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    kernel = jax.device_put(
        normal((6, 10)),
        jax.sharding.NamedSharding(
            jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b")), jax.sharding.PartitionSpec("a", "b")
        ),
    )
    layers = [{"w": normal((3, 4))}, {"w": normal((3, 4)) + 1}]
    bias = normal((10,), jnp.bfloat16)
    tree = {
        "params": {"dense": {"kernel": kernel, "bias": bias}, "layers": layers},
        "opt_state": {"mu": {"dense": {"kernel": normal((6, 10)) * 2}}, "count": jnp.array(7, jnp.int32)},
        "step": 12,
        "lr": 0.5,
        "npint": np.arange(4, dtype=np.int8),
    }
    texts = {"note": "hello", "none": None}
    ocp.PyTreeCheckpointer().save(folder / "ocdbt", tree | texts)
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(folder / "files", tree | texts)
    manager = ocp.CheckpointManager(folder / "run")
    manager.save(5, args=ocp.args.StandardSave(tree))
    manager.wait_until_finished()
    values = {"kernel": np.asarray(kernel), "bias": np.asarray(bias).view(np.int16)}
    values |= {f"w{k}": np.asarray(layer["w"]) for k, layer in enumerate(layers)}
    np.savez(folder / "expected.npz", **values)


if __name__ == "__main__":
    main()
