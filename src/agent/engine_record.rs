//! Encodes and decodes the engine record that each worker publishes in the key-value store.
//!
//! A record comes from another process, so every field is bounded and checked. Begin at `decode`.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::config::DEVICES_MAX;
use crate::coordination::{self, PeerJobQuery, TaskIncarnation};
use crate::transfer::{DeviceId, EngineAddress, Incarnation, MemberId, MemberInfo};

/// The format version that this program writes and reads.
const VERSION: u32 = 1;
/// The greatest length of a record, in bytes.
pub const BYTES_MAX: usize = 64 << 10;
const HOST_MAX: usize = 256;
/// The greatest length of a Unix socket name, in bytes.
const LOCAL_MAX: usize = 107;
const ADDRESSES_MAX: usize = 64;

/// The record under [`store_key`], as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct EngineRecord {
    version: u32,
    incarnation: Incarnation,
    address: EngineAddress,
    devices: Vec<DeviceId>,
}

/// The reason for which a record is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineRecordError {
    /// It is too long.
    #[error("it has more than {BYTES_MAX} bytes")]
    TooLong,
    /// It is no valid record.
    #[error("it cannot be read: {0}")]
    Malformed(String),
    /// Another version of this program wrote it.
    #[error(
        "it is of version {0}, and this program reads version {VERSION}: run the same program everywhere"
    )]
    Version(u32),
    /// It is the record of another incarnation.
    #[error("it speaks of incarnation {0}")]
    WrongIncarnation(Incarnation),
    /// One of its fields has an invalid value.
    #[error("its {0} is not usable")]
    InvalidField(&'static str),
}

/// Returns the key of the engine record of `member`.
#[must_use]
pub fn store_key(member: MemberId) -> String {
    let task = coordination::TaskId(member.task.0.cast_signed());
    PeerJobQuery::engine_record_key(task, TaskIncarnation(member.incarnation.get()))
}

/// Encodes the engine record of a member.
pub fn encode(
    incarnation: Incarnation,
    address: &EngineAddress,
    devices: &[DeviceId],
) -> Result<Vec<u8>, String> {
    let entry =
        EngineRecord { version: VERSION, incarnation, address: address.clone(), devices: devices.to_vec() };
    serde_json::to_vec(&entry).map_err(|error| error.to_string())
}

/// Decodes the record under the key of `member`.
///
/// # Errors
/// If it is not a valid record of that member.
pub fn decode(member: MemberId, bytes: &[u8]) -> Result<MemberInfo, EngineRecordError> {
    if bytes.len() > BYTES_MAX {
        return Err(EngineRecordError::TooLong);
    }
    // The version is decoded first, because another version may have another format.
    #[derive(Deserialize)]
    struct VersionedRecord {
        version: u32,
    }
    let form = |error: serde_json::Error| {
        EngineRecordError::Malformed(crate::text::escape_to_one_line(&error.to_string()).into_owned())
    };
    let VersionedRecord { version } = serde_json::from_slice(bytes).map_err(form)?;
    if version != VERSION {
        return Err(EngineRecordError::Version(version));
    }
    let EngineRecord { incarnation, address, mut devices, .. } =
        serde_json::from_slice(bytes).map_err(form)?;
    if incarnation != member.incarnation {
        return Err(EngineRecordError::WrongIncarnation(incarnation));
    }
    let readable = |text: &str| crate::text::is_safe_single_line(text);
    if address.host.len() > HOST_MAX || !readable(&address.host) {
        return Err(EngineRecordError::InvalidField("host"));
    }
    if address.local.len() > LOCAL_MAX || !readable(&address.local) {
        return Err(EngineRecordError::InvalidField("socket"));
    }
    let dialable = |address: &SocketAddr| address.port() != 0 && !address.ip().is_unspecified();
    if address.tcp.len() > ADDRESSES_MAX || !address.tcp.iter().all(dialable) {
        return Err(EngineRecordError::InvalidField("address"));
    }
    let count = devices.len();
    devices.sort_unstable();
    devices.dedup();
    if count > DEVICES_MAX as usize || devices.len() != count {
        return Err(EngineRecordError::InvalidField("list of devices"));
    }
    Ok(MemberInfo { incarnation, address, devices })
}

/// Removes duplicate devices from all but the first of `peers` that has them. Returns the tasks that lost
/// devices.
pub fn remove_duplicate_devices<'a>(peers: impl Iterator<Item = (u32, &'a mut MemberInfo)>) -> Vec<u32> {
    let mut owned: BTreeSet<DeviceId> = BTreeSet::new();
    let mut greedy = Vec::new();
    for (task, peer) in peers {
        let before = peer.devices.len();
        peer.devices.retain(|device| owned.insert(*device));
        if peer.devices.len() < before {
            greedy.push(task);
        }
    }
    greedy
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::TaskId;

    fn example_member() -> MemberId {
        MemberId::of_own_job(TaskId(3), Incarnation::new(0xabc).unwrap())
    }

    fn address() -> EngineAddress {
        let tcp = vec!["10.0.0.1:9".parse().unwrap()];
        EngineAddress {
            host: "boot".to_owned(),
            local: "muster-3".to_owned(),
            tcp,
            ..EngineAddress::default()
        }
    }

    fn decode_edited_record(edit: impl Fn(&mut serde_json::Value)) -> Result<MemberInfo, EngineRecordError> {
        let bytes = encode(example_member().incarnation, &address(), &[DeviceId(6144)]).unwrap();
        let mut value = serde_json::from_slice(&bytes).unwrap();
        edit(&mut value);
        decode(example_member(), value.to_string().as_bytes())
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(store_key(example_member()), "muster/transfer/3/0000000000000abc");
        let peer = decode_edited_record(|_| ()).unwrap();
        assert_eq!((peer.incarnation, peer.address), (example_member().incarnation, address()));
        assert_eq!(peer.devices, [DeviceId(6144)]);
    }

    #[test]
    fn hostile_entries_are_refused_by_name() {
        assert_eq!(
            decode_edited_record(|entry| entry["version"] = 2.into()),
            Err(EngineRecordError::Version(2))
        );
        assert!(matches!(
            decode_edited_record(|entry| entry["incarnation"] = 5.into()),
            Err(EngineRecordError::WrongIncarnation(_))
        ));
        assert!(matches!(
            decode_edited_record(|entry| entry["incarnation"] = 0.into()),
            Err(EngineRecordError::Malformed(_))
        ));
        assert!(matches!(
            decode_edited_record(|entry| entry["devices"] = "all".into()),
            Err(EngineRecordError::Malformed(_))
        ));
        let devices = EngineRecordError::InvalidField("list of devices");
        assert_eq!(decode_edited_record(|entry| entry["devices"] = vec![1, 1].into()), Err(devices.clone()));
        let many: Vec<u32> = (0..=DEVICES_MAX).collect();
        assert_eq!(decode_edited_record(|entry| entry["devices"] = many.clone().into()), Err(devices));
        let host = decode_edited_record(|entry| entry["address"]["host"] = "x".repeat(HOST_MAX + 1).into());
        assert_eq!(host, Err(EngineRecordError::InvalidField("host")));
        assert_eq!(
            decode_edited_record(|entry| entry["address"]["local"] = "a\u{1b}[2J".into()),
            Err(EngineRecordError::InvalidField("socket"))
        );
        for wrong in ["0.0.0.0:9", "10.0.0.1:0"] {
            let refused = decode_edited_record(|entry| entry["address"]["tcp"] = vec![wrong].into());
            assert_eq!(refused, Err(EngineRecordError::InvalidField("address")), "{wrong}");
        }
        for noise in [&b""[..], b"\xff", b"[]", b"{}", b"null"] {
            assert!(
                matches!(decode(example_member(), noise), Err(EngineRecordError::Malformed(_))),
                "{noise:?}"
            );
        }
        let deep = "[".repeat(50_000);
        assert!(matches!(decode(example_member(), deep.as_bytes()), Err(EngineRecordError::Malformed(_))));
        assert_eq!(decode(example_member(), &vec![b' '; BYTES_MAX + 1]), Err(EngineRecordError::TooLong));
    }

    #[test]
    fn device_ids_claimed_twice_belong_to_the_first_task() {
        let peer = |devices: &[u32]| MemberInfo {
            incarnation: example_member().incarnation,
            address: address(),
            devices: devices.iter().copied().map(DeviceId).collect(),
        };
        let mut peers = [(0, peer(&[0, 1])), (1, peer(&[1, 2])), (2, peer(&[3]))];
        let greedy = remove_duplicate_devices(peers.iter_mut().map(|(task, peer)| (*task, peer)));
        assert_eq!(greedy, [1]);
        assert_eq!(peers[1].1.devices, [DeviceId(2)]);
    }
}
