//! Properties of every decoder that reads bytes from outside.
//!
//! This module is only for tests. Each property is a function that takes any bytes and panics if the property does
//! not hold. The fuzz targets (`tests/fuzz`) search for bytes that violate a property. The test in this file runs
//! every file of their corpus. Begin at [`targets`].

use prost::Message as _;

use crate::coordination::{TopologyKey, decode_devices};
use crate::proto::xla;
pub use crate::transfer::fuzzing::FuzzTarget;

/// The memory that a property may take for the shortest input.
pub const MEMORY: usize = 8 << 20;

/// The properties of this crate.
static TARGETS: [FuzzTarget; 7] = [
    FuzzTarget::new("hpack", crate::http2::fuzzing::check_header_blocks, 1 << 10),
    FuzzTarget::new("http2", crate::http2::fuzzing::check_connection, 1 << 10),
    FuzzTarget::new("grpc-body", crate::grpc::fuzzing::check_request_body, 1 << 10),
    FuzzTarget::new("grpc-message", crate::grpc::fuzzing::check_request_message, 1 << 10),
    FuzzTarget::new("topology", topology, 1 << 10),
    FuzzTarget::new("tokens", crate::http::check_token_file_round_trip, 1 << 10),
    FuzzTarget::new("config", crate::config::check_config_round_trip, 1 << 10),
];

/// Returns every property, those of the transfer engine last.
pub fn targets() -> impl Iterator<Item = &'static FuzzTarget> {
    TARGETS.iter().chain(&crate::transfer::fuzzing::TARGETS)
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
        for target in targets() {
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
