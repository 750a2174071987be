//! Properties of every decoder that reads bytes from outside.
//!
//! It is no part of the product. Each property takes any bytes and panics if it does not hold. The fuzz targets (`tests/fuzz`)
//! look for bytes that break one; the test below feeds every file of their corpus. Begin at [`TARGETS`].

use prost::Message as _;

use crate::coordination::{TopologyKey, decode_devices};
use crate::proto::xla;
pub use crate::transfer::fuzzing::Property;

/// A property, by its name.
#[derive(Debug, Clone, Copy)]
pub struct FuzzTarget {
    /// Its name, and that of its folder in the corpus.
    pub name: &'static str,
    /// The property.
    pub property: Property,
    /// How much memory it may take for each byte of the input, beside [`MEMORY`].
    pub growth: usize,
}

/// The memory that a property may take for the shortest input.
pub const MEMORY: usize = 8 << 20;

/// All of them.
pub static TARGETS: [FuzzTarget; 11] = {
    let [frame, hello, link, plan] = crate::transfer::fuzzing::TARGETS;
    [
        target("hpack", crate::http2::fuzzing::hpack, 1 << 10),
        target("http2", crate::http2::fuzzing::connection, 1 << 10),
        target("grpc-body", crate::grpc::fuzzing::body, 1 << 10),
        target("grpc-message", crate::grpc::fuzzing::message, 1 << 10),
        target("topology", topology, 1 << 10),
        target("tokens", crate::http::fuzz_tokens, 1 << 10),
        target("config", crate::config::fuzz, 1 << 10),
        target(frame.0, frame.1, 1 << 10),
        target(hello.0, hello.1, 1 << 10),
        target(link.0, link.1, 1 << 10),
        target(plan.0, plan.1, 4 << 10),
    ]
};

const fn target(name: &'static str, property: Property, growth: usize) -> FuzzTarget {
    FuzzTarget { name, property, growth }
}

/// Takes the value of a topology key: a task's, or that of all if the first byte is odd.
///
/// There are no more devices than the value tells of, and they take no more memory than a bound times the value.
fn topology(input: &[u8]) {
    let Some((first, value)) = input.split_first() else { return };
    let platform = "cpu".to_owned();
    let (key, told) = if first & 1 == 0 {
        let told = xla::LocalTopologyProto::decode(value).map_or(0, |process| process.devices.len());
        (TopologyKey::Local { platform }, told)
    } else {
        let told = xla::GlobalTopologyProto::decode(value)
            .map_or(0, |all| all.processes.iter().map(|process| process.devices.len()).sum());
        (TopologyKey::Global { platform }, told)
    };
    let devices = decode_devices([(&key, value)]);
    assert!(devices.len() <= told);
    assert!(devices.is_sorted_by_key(|device| (device.global_id, device.task)));
    let text: usize = devices.iter().map(|device| device.kind.len() + device.boot_id.len()).sum();
    assert!(text <= 256 * input.len(), "{text} bytes of text are made of {}", input.len());
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_property_holds_of_its_corpus() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus");
        for target in TARGETS {
            let files = std::fs::read_dir(corpus.join(target.name)).expect("every target has a corpus");
            let mut count = 0;
            for file in files {
                let file = file.expect("the corpus can be read").path();
                println!("{}", file.display());
                (target.property)(&std::fs::read(&file).expect("the corpus can be read"));
                count += 1;
            }
            assert!(count > 0, "{} has no corpus", target.name);
        }
    }
}
