//! Properties of every decoder that reads bytes from outside.
//!
//! This module is only for tests. Each property is a function that takes any bytes and panics if the property does
//! not hold. The fuzz targets (`tests/fuzz`) search for bytes that violate a property. The tests in this file run the
//! properties on every file of their corpus, and on damaged copies of these files. Begin at [`fuzz_targets`].

use prost::Message as _;

use crate::coordination::{TopologyKey, decode_devices};
use crate::proto::xla;
pub use crate::transfer::fuzzing::FuzzTarget;

/// The memory that a property may take for the shortest input.
pub const MEMORY: usize = 8 << 20;

/// The properties of this crate.
static TARGETS: [FuzzTarget; 9] = [
    FuzzTarget::new("hpack", crate::http2::fuzzing::check_header_blocks, 1 << 10),
    FuzzTarget::new("http2", crate::http2::fuzzing::check_connection, 1 << 10),
    FuzzTarget::new("grpc-body", crate::grpc::fuzzing::check_request_body, 1 << 10),
    FuzzTarget::new("grpc-message", crate::grpc::fuzzing::check_request_message, 1 << 10),
    FuzzTarget::new("topology", check_topology_decoder, 1 << 10),
    FuzzTarget::new("tokens", crate::http::check_token_file_round_trip, 1 << 10),
    FuzzTarget::new("stacks", crate::service::stacks::check_stack_answer, 1 << 10),
    FuzzTarget::new("collectives", crate::service::collectives::check_collectives_report, 1 << 10),
    FuzzTarget::new("config", crate::config::check_config_round_trip, 1 << 10),
];

/// Returns every property, those of the transfer engine last.
pub fn fuzz_targets() -> impl Iterator<Item = &'static FuzzTarget> {
    TARGETS.iter().chain(&crate::transfer::fuzzing::TARGETS)
}

/// Takes the value of a topology key: a task's, or that of all if the first byte is odd.
///
/// There are no more devices than the value tells of, and they take no more memory than a bound times the value.
fn check_topology_decoder(input: &[u8]) {
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
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::Path;

    use fastrand::Rng;

    use super::*;

    /// The number of damaged inputs made from each file of the corpus.
    const DAMAGED_PER_FILE: usize = 300;
    /// The length of the longest damaged input.
    const DAMAGED_LENGTH_MAX: usize = 16 << 10;

    fn corpus_of(target: &FuzzTarget) -> Vec<Vec<u8>> {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target.name);
        let files = std::fs::read_dir(corpus).expect("every target has a corpus");
        let mut files: Vec<_> = files.map(|file| file.expect("the corpus can be read").path()).collect();
        files.sort();
        assert!(!files.is_empty(), "{} has no corpus", target.name);
        files.iter().map(|file| std::fs::read(file).expect("the corpus can be read")).collect()
    }

    #[test]
    fn every_property_holds_of_its_corpus() {
        for target in fuzz_targets() {
            for input in corpus_of(target) {
                println!("{}: {}", target.name, input.escape_ascii());
                (target.property)(&input);
            }
        }
    }

    /// Damages an input in one to four places, as a defective or hostile peer would.
    fn damage_input(random: &mut Rng, input: &[u8], other: &[u8]) -> Vec<u8> {
        const NUMBERS: [u32; 8] = [0, 1, 0x7f, 0xff, 0x7fff, 0xff_ffff, 0x7fff_ffff, u32::MAX];
        let mut damaged = input.to_vec();
        for _ in 0..random.usize(1..=4) {
            let at = random.usize(0..=damaged.len());
            let end = random.usize(at..=damaged.len()).min(at + 64);
            match random.u8(0..7) {
                0 => damaged.truncate(at),
                1 => drop(damaged.drain(at..end)),
                2 => damaged.extend_from_within(at..end),
                3 => {
                    let from = random.usize(0..=other.len());
                    let until = random.usize(from..=other.len());
                    damaged.splice(at..end, other[from..until].iter().copied());
                }
                4 => {
                    let number = NUMBERS[random.usize(..NUMBERS.len())];
                    let bytes = if random.bool() { number.to_be_bytes() } else { number.to_le_bytes() };
                    damaged.iter_mut().skip(at).zip(bytes).for_each(|(byte, new)| *byte = new);
                }
                5 => damaged.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << random.u8(0..8)),
                _ => damaged.iter_mut().skip(at).take(1).for_each(|byte| *byte = random.u8(..)),
            }
        }
        damaged.truncate(DAMAGED_LENGTH_MAX);
        damaged
    }

    /// A search without guidance: other inputs in every run, unless `MUSTER_SEED` selects those of one run.
    /// `tests/fuzz/run` searches longer, guided by coverage.
    #[test]
    fn every_property_holds_of_damaged_inputs() {
        let seed = std::env::var("MUSTER_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| fastrand::u64(..));
        println!("MUSTER_SEED={seed} makes the same inputs again");
        let mut random = Rng::with_seed(seed);
        for target in fuzz_targets() {
            let corpus = corpus_of(target);
            for _ in 0..DAMAGED_PER_FILE * corpus.len() {
                let [one, other] = [random.usize(..corpus.len()), random.usize(..corpus.len())];
                let input = damage_input(&mut random, &corpus[one], &corpus[other]);
                let holds = catch_unwind(AssertUnwindSafe(|| (target.property)(&input))).is_ok();
                assert!(holds, "{} does not hold of b\"{}\"", target.name, input.escape_ascii());
            }
        }
    }
}
