//! Compares the shards of this planner with those of JAX, which `jax_shards.py` recorded.

use muster::transfer::plan::{ArrayDescription, DeviceId, Dtype, ShardRegion, Sharding};
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    sharding: Sharding,
    shape: Vec<u64>,
    held: Vec<(DeviceId, Vec<(u64, u64)>)>,
}

#[test]
fn every_device_holds_what_jax_says_that_it_holds() {
    let cases: Vec<Case> =
        serde_json::from_str(include_str!("jax_shards.json")).expect("the cases can be read");
    assert!(cases.len() > 40);
    for Case { sharding, shape, held } in cases {
        let array = ArrayDescription { shape, dtype: Dtype::Float32, sharding };
        let region = |stretches: Vec<(u64, u64)>| {
            let (start, extent) = stretches.iter().map(|(start, end)| (*start, end - start)).unzip();
            ShardRegion { start, extent }
        };
        let wanted: Vec<_> =
            held.into_iter().map(|(device, stretches)| (device, region(stretches))).collect();
        assert_eq!(array.shards().expect("it makes sense"), wanted, "{array:?}");
    }
}
