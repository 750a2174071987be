//! The encoding of records: a header of 16 bytes, the payload, and padding to 8 bytes. Without IO.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..4 | CRC32C of the rest of the header and of the payload, combined with the seed of the folder |
//! | 4..8 | length of the payload |
//! | 8..16 | number of the record, times 256, plus its kind |
//!
//! All integers are little-endian. A record never begins with 16 zero bytes, because record numbers begin at 1. So the
//! unwritten rest of a segment, which is zero, is no record. Begin at `write_header` and `decode`.

/// The length of a header.
pub(crate) const HEADER_BYTES: usize = 16;
/// Records begin at multiples of this.
const ALIGNMENT: usize = 8;
/// The greatest number of a record.
const NUMBER_MAX: u64 = u64::MAX >> 8;

/// The kind of a record. The journal itself uses [`RecordKind::DURABLE_MARK`]; its user chooses the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RecordKind(pub u8);

impl RecordKind {
    /// A record of the journal itself. Its payload is a record number: all records below it were durable when the mark
    /// was appended.
    pub const DURABLE_MARK: Self = Self(u8::MAX);
}

/// A record that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalRecord<'a> {
    /// The number of the record; the first record of a journal is 1.
    pub number: u64,
    /// The kind of the record.
    pub kind: RecordKind,
    /// The payload.
    pub payload: &'a [u8],
}

/// The contents of a segment at a place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Decoded<'a> {
    /// A whole record, and the length that it occupies with header and padding.
    Record(JournalRecord<'a>, usize),
    /// Zeroes, as far as a header would go: nothing was written.
    Unwritten,
    /// Anything else.
    Invalid,
}

/// Returns the length that a record occupies whose payload has `payload` bytes.
pub(crate) const fn occupied_bytes(payload: usize) -> usize {
    HEADER_BYTES + payload.next_multiple_of(ALIGNMENT)
}

/// Writes the header of a record whose payload is already at `record[HEADER_BYTES..]`. `record` ends with the payload.
///
/// # Panics
/// If `record` is shorter than a header, or the payload or the number is too great.
pub(crate) fn write_header(record: &mut [u8], seed: u32, number: u64, kind: RecordKind) {
    assert!(number > 0 && number <= NUMBER_MAX, "record number {number}");
    let payload = u32::try_from(record.len() - HEADER_BYTES).unwrap_or_else(|_| panic!("a payload of 4 GiB"));
    record[8..16].copy_from_slice(&(number << 8 | u64::from(kind.0)).to_le_bytes());
    record[4..8].copy_from_slice(&payload.to_le_bytes());
    let checksum = crc32c(&record[4..]) ^ seed;
    record[..4].copy_from_slice(&checksum.to_le_bytes());
}

/// Decodes what lies at the beginning of `bytes`.
pub(crate) fn decode(bytes: &[u8], seed: u32) -> Decoded<'_> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return if bytes.iter().all(|byte| *byte == 0) { Decoded::Unwritten } else { Decoded::Invalid };
    };
    if *header == [0; HEADER_BYTES] {
        return Decoded::Unwritten;
    }
    let [a, b, c, d, e, f, g, h, tail @ ..] = *header;
    let (checksum, payload) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
    let tagged = u64::from_le_bytes(tail);
    let Some(payload) = usize::try_from(payload).ok().filter(|payload| *payload <= rest.len()) else {
        return Decoded::Invalid;
    };
    if crc32c(&bytes[4..HEADER_BYTES + payload]) ^ seed != checksum || tagged >> 8 == 0 {
        return Decoded::Invalid;
    }
    let kind = RecordKind(header[8]);
    let record = JournalRecord { number: tagged >> 8, kind, payload: &rest[..payload] };
    Decoded::Record(record, occupied_bytes(payload))
}

/// Returns the intact records in `bytes` whose numbers are above `after`, and their places, wherever they begin. The bytes
/// between them may be anything. Numbers ascend.
pub(crate) fn intact_records(
    bytes: &[u8],
    seed: u32,
    after: u64,
) -> impl Iterator<Item = (JournalRecord<'_>, usize)> {
    let (mut at, mut last) = (0, after);
    std::iter::from_fn(move || {
        while at + HEADER_BYTES <= bytes.len() {
            // The number of a record that can be here is not far above the last one, because each record in between
            // takes space. This test costs less than a checksum.
            let mut tagged = [0; 8];
            tagged.copy_from_slice(&bytes[at + 8..at + 16]);
            let number = u64::from_le_bytes(tagged) >> 8;
            let most = last.saturating_add((at / HEADER_BYTES) as u64 + 1);
            if number > last
                && number <= most
                && let Decoded::Record(record, occupied) = decode(&bytes[at..], seed)
            {
                let place = at;
                at += occupied;
                last = record.number;
                return Some((record, place));
            }
            at += ALIGNMENT;
        }
        None
    })
}

/// Returns the number in the payload of a durable mark.
pub(crate) fn marked_durable(record: &JournalRecord<'_>) -> Option<u64> {
    let payload = record.payload.try_into().ok().filter(|_| record.kind == RecordKind::DURABLE_MARK)?;
    Some(u64::from_le_bytes(payload))
}

/// Returns the CRC32C of `bytes`.
#[expect(clippy::cast_possible_truncation, reason = "the library returns the 32-bit checksum in 64 bits")]
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u32 = 0x1234_5678;

    fn append(bytes: &mut Vec<u8>, number: u64, payload: &[u8]) {
        let at = bytes.len();
        bytes.resize(at + HEADER_BYTES, 0);
        bytes.extend_from_slice(payload);
        write_header(&mut bytes[at..], SEED, number, RecordKind(1));
        bytes.resize(at + occupied_bytes(payload.len()), 0);
    }

    #[test]
    fn a_record_comes_back_as_it_was() {
        for length in [0, 1, 7, 8, 9, 4096] {
            let payload = vec![7; length];
            let mut bytes = Vec::new();
            append(&mut bytes, 5, &payload);
            let record = JournalRecord { number: 5, kind: RecordKind(1), payload: &payload };
            assert_eq!(decode(&bytes, SEED), Decoded::Record(record, bytes.len()));
            assert_eq!(decode(&bytes, SEED + 1), Decoded::Invalid, "a record of another folder");
        }
        assert_eq!(decode(&[0; 100], SEED), Decoded::Unwritten);
        assert_eq!(decode(&[0; 3], SEED), Decoded::Unwritten);
        assert_eq!(decode(&[], SEED), Decoded::Unwritten);
        assert_eq!(decode(&[1; 3], SEED), Decoded::Invalid);
    }

    #[test]
    fn every_changed_bit_and_every_missing_byte_is_noticed() {
        let mut bytes = Vec::new();
        append(&mut bytes, 300, b"sixteen bytes of");
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&changed, SEED), Decoded::Invalid, "bit {bit}");
        }
        for length in 1..bytes.len() {
            assert_eq!(decode(&bytes[..length], SEED), Decoded::Invalid, "{length} bytes");
            let mut torn = bytes.clone();
            torn[length..].fill(0);
            assert_eq!(decode(&torn, SEED), Decoded::Invalid, "{length} bytes, then zeroes");
        }
    }

    #[test]
    fn intact_records_are_found_behind_damage() {
        let mut bytes = Vec::new();
        (1..=40)
            .for_each(|number| append(&mut bytes, number, &vec![3; usize::try_from(number).unwrap() * 5]));
        bytes[3] ^= 1;
        let second = occupied_bytes(5);
        bytes[second + 4] ^= 0x80;
        let found: Vec<u64> = intact_records(&bytes, SEED, 0).map(|(record, _)| record.number).collect();
        assert_eq!(found, (3..=40).collect::<Vec<_>>());
        let found: Vec<u64> = intact_records(&bytes, SEED, 38).map(|(record, _)| record.number).collect();
        assert_eq!(found, [39, 40]);
        assert_eq!(intact_records(&[0; 4096], SEED, 0).count(), 0);
    }
}
