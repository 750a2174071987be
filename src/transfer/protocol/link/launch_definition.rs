//! A definition: the list of the transfers of a prepared launch with one peer. Each side makes its own list and sends
//! it to the other. Bytes move only if the two are equal.
//!
//! This module compares lists; `link_side.rs` launches. Begin at [`LaunchDefinition`].

use crate::base::key::TransferKey;
use crate::base::layout::LayoutFingerprint;
use crate::base::membership::DeviceId;
use crate::protocol::frame::{read_u32_at, read_u64_at};

/// The bytes of an entry on the wire.
pub const ENTRY: usize = 48;
/// The most transfers of a definition.
pub const ENTRIES_MAX: usize = 1 << 16;

/// The place from which a peer on the same host can fetch the bytes of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FetchSource {
    /// None: the transfer is a receive, or nothing is fetched.
    None,
    /// Shared memory that the peer may map: the region, and the offset in it.
    Region(u32, u64),
    /// An address in the sender's process.
    Address(u64),
    /// Memory of the GPU with this number in the sender's process, whose bytes move through a clique.
    Gpu(u32),
}

/// One transfer. Both sides' entries are equal but for `outgoing` and `source`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DefinitionEntry {
    /// The key.
    pub key: TransferKey,
    /// The sending device.
    pub from: DeviceId,
    /// The receiving device.
    pub to: DeviceId,
    /// The number of bytes.
    pub bytes: u64,
    /// The fingerprint of the layout.
    pub fingerprint: LayoutFingerprint,
    /// Whether this side sends it.
    pub outgoing: bool,
    /// The place from which the receiver may fetch it.
    pub source: FetchSource,
}

impl DefinitionEntry {
    /// Returns the sort key of the transfers in a group, which is the same on both sides, whatever the order
    /// of the request.
    pub const fn sort_key(&self) -> (u64, u32, u32) {
        (self.key.0, self.from.0, self.to.0)
    }

    /// Returns whether both sides of a transfer have the same layout.
    pub fn has_layout_of(&self, other: &Self) -> bool {
        (self.bytes, self.fingerprint) == (other.bytes, other.fingerprint)
    }

    /// Returns the layout for people.
    pub fn layout_text(&self) -> String {
        format!("{} bytes of layout {}", self.bytes, self.fingerprint)
    }

    /// Appends the fields on which both sides must agree, as the digest and the wire have them.
    fn append_layout(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.key.0.to_le_bytes());
        bytes.extend_from_slice(&self.from.0.to_le_bytes());
        bytes.extend_from_slice(&self.to.0.to_le_bytes());
        bytes.extend_from_slice(&self.bytes.to_le_bytes());
        bytes.extend_from_slice(&self.fingerprint.0.to_le_bytes());
    }
}

/// The list of transfers with one peer, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchDefinition {
    /// The transfers, sorted by [`DefinitionEntry::sort_key`].
    pub entries: Vec<DefinitionEntry>,
    /// The digest of all fields that must be equal on both sides.
    pub digest: u64,
    /// The bytes that this side sends.
    pub sent: u64,
    /// The bytes that this side receives.
    pub received: u64,
}

impl LaunchDefinition {
    /// Creates a definition of transfers in any order.
    pub fn new(mut entries: Vec<DefinitionEntry>) -> Self {
        entries.sort_unstable_by_key(DefinitionEntry::sort_key);
        let mut words = Vec::with_capacity(entries.len() * 40);
        for entry in &entries {
            entry.append_layout(&mut words);
        }
        let total = |outgoing| {
            entries.iter().filter(|e| e.outgoing == outgoing).fold(0u64, |n, e| n.saturating_add(e.bytes))
        };
        let (sent, received) = (total(true), total(false));
        Self { digest: LayoutFingerprint::hash_of_parts(&[&words]).0, sent, received, entries }
    }

    /// Encodes the definition for the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.entries.len() * ENTRY);
        for entry in &self.entries {
            let (kind, region, offset) = match entry.source {
                FetchSource::None => (0u32, 0, 0),
                FetchSource::Region(region, offset) => (1, region, offset),
                FetchSource::Address(address) => (2, 0, address),
                FetchSource::Gpu(gpu) => (3, gpu, 0),
            };
            entry.append_layout(&mut bytes);
            bytes.extend_from_slice(&(kind << 1 | u32::from(entry.outgoing)).to_le_bytes());
            bytes.extend_from_slice(&region.to_le_bytes());
            bytes.extend_from_slice(&offset.to_le_bytes());
        }
        bytes
    }

    /// Decodes a definition that a peer sent, as seen from this side: what the peer sends is received here.
    /// None if the bytes are no such list.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if !bytes.len().is_multiple_of(ENTRY) || bytes.len() / ENTRY > ENTRIES_MAX {
            return None;
        }
        let mut total = 0u64;
        let entries = bytes
            .chunks_exact(ENTRY)
            .map(|entry| {
                let word = read_u32_at(entry, 32);
                let source = match word >> 1 {
                    0 => FetchSource::None,
                    1 => FetchSource::Region(read_u32_at(entry, 36), read_u64_at(entry, 40)),
                    2 => FetchSource::Address(read_u64_at(entry, 40)),
                    3 => FetchSource::Gpu(read_u32_at(entry, 36)),
                    _ => return None,
                };
                let bytes = read_u64_at(entry, 16);
                total = total.checked_add(bytes)?;
                Some(DefinitionEntry {
                    key: TransferKey(read_u64_at(entry, 0)),
                    from: DeviceId(read_u32_at(entry, 8)),
                    to: DeviceId(read_u32_at(entry, 12)),
                    bytes,
                    fingerprint: LayoutFingerprint(read_u64_at(entry, 24)),
                    outgoing: word & 1 == 0,
                    source,
                })
            })
            .collect::<Option<Vec<_>>>()?;
        entries.is_sorted_by_key(DefinitionEntry::sort_key).then(|| Self::new(entries))
    }

    /// Returns whether no transfer that the list's side sends can be fetched.
    pub fn is_without_sources(&self) -> bool {
        self.entries.iter().all(|entry| entry.source == FetchSource::None)
    }

    /// Returns the keys as text for people.
    pub fn describe_keys(&self) -> String {
        const SHOWN: usize = 8;
        let shown: Vec<_> =
            self.entries.iter().take(SHOWN).map(|e| format!("{} ({}→{})", e.key, e.from, e.to)).collect();
        let more = self.entries.len().saturating_sub(SHOWN);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("[{}{more}]", shown.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: u64, outgoing: bool) -> DefinitionEntry {
        DefinitionEntry {
            key: TransferKey(key),
            from: DeviceId(u32::from(!outgoing)),
            to: DeviceId(u32::from(outgoing)),
            bytes: key * 10,
            fingerprint: LayoutFingerprint(key),
            outgoing,
            source: if outgoing { FetchSource::Region(4, key) } else { FetchSource::None },
        }
    }

    #[test]
    fn both_sides_have_one_digest_whatever_the_order() {
        let here = LaunchDefinition::new(vec![entry(3, true), entry(1, false), entry(2, true)]);
        let there = LaunchDefinition::decode(&here.encode()).unwrap();
        assert_eq!(here.digest, there.digest);
        assert_eq!((here.sent, here.received), (there.received, there.sent));
        assert_eq!(LaunchDefinition::new(vec![entry(2, true), entry(3, true), entry(1, false)]), here);
        assert_ne!(LaunchDefinition::new(vec![entry(2, true), entry(3, true)]).digest, here.digest);
        assert_eq!(
            here.describe_keys(),
            "[0000000000000001 (1→0), 0000000000000002 (0→1), 0000000000000003 (0→1)]"
        );
    }

    #[test]
    fn what_is_no_list_is_refused() {
        let bytes = LaunchDefinition::new(vec![entry(1, true), entry(2, true)]).encode();
        assert!(LaunchDefinition::decode(&bytes[..bytes.len() - 1]).is_none());
        let mut swapped = bytes[ENTRY..].to_vec();
        swapped.extend_from_slice(&bytes[..ENTRY]);
        assert!(LaunchDefinition::decode(&swapped).is_none(), "not in order");
        let mut unknown = bytes.clone();
        unknown[32] = 0xff;
        assert!(LaunchDefinition::decode(&unknown).is_none());
        let mut vast = bytes;
        vast[16..24].fill(0xff);
        vast[ENTRY + 16..ENTRY + 24].fill(0xff);
        assert!(LaunchDefinition::decode(&vast).is_none(), "the sum overflows");
    }
}
