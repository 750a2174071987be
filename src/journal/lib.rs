//! A journal: a log of numbered records, and snapshots that replace the records before them. It survives the death of
//! its process at any instruction.
//!
//! The crate knows bytes and files. Its user decides what records mean and how a snapshot is made. Begin at
//! [`JournalFolder::open`], then [`JournalFolder::recover`] and [`JournalWriter::append`].
//!
//! A journal is a folder with these files:
//!
//! | file | contents |
//! | --- | --- |
//! | `identity` | the version of the format, and the random id of the folder |
//! | `lock` | a description of the process that has the journal open; the process holds a lock on the file |
//! | `segment-N` | records, in the order of their numbers; `N` counts segments |
//! | `snapshot-R` | the state after all records with numbers below `R` |
//! | `removed/` | what a recovery or a repair took out; of earlier ones, as much as the bounds permit |
//!
//! - *A record is safe from the death of the process as soon as it is appended.* The present segment is mapped into
//!   memory, and the kernel keeps what was written to the mapping. An append needs no system call.
//! - *A record is safe from the loss of the host once it is durable*: a thread writes the segment to the disk
//!   ([`JournalWriter::durable_records`]).
//! - *An interrupted append is told from damage.* Each record has a checksum. A process that dies leaves all records
//!   but the last one whole. So an invalid record that has intact records after it is damage if the host has not
//!   restarted since, or if a later record says that the invalid one was durable. Damage is an error. All else is a
//!   *torn tail*: it is cut off and reported (`recovery.rs`).
//! - *A record that has been cut off stays cut off.* After a recovery, the writer begins a new segment, whose header has
//!   the number of its first record.
//!
//! | file | owns |
//! | --- | --- |
//! | `record.rs` | the encoding of records, without IO |
//! | `segment.rs` | one segment: its header, its mapping |
//! | `snapshot.rs` | snapshot files |
//! | `options.rs` | settings, and the error of an append |
//! | `folder.rs` | the folder: its lock, its identity, the names of files |
//! | `copy.rs` | a copy of a whole journal, and its return |
//! | `recovery.rs` | reading a journal |
//! | `repair.rs` | ending a damaged journal before the damage; beginning a journal with a snapshot |
//! | `removed.rs` | the folder `removed/` and its bounds |
//! | `upkeep.rs` | the threads that allocate segments, write to the disk, write snapshots, and delete old files |
//! | `writer.rs` | appending |
#![warn(clippy::too_many_lines)]

mod copy;
mod folder;
mod options;
mod record;
mod recovery;
mod removed;
mod repair;
mod segment;
mod snapshot;
#[cfg(test)]
mod tests;
mod upkeep;
mod writer;

pub use copy::JournalCopy;
pub use folder::{JournalError, JournalFolder};
pub use options::{AppendError, JournalOptions};
pub use record::{JournalRecord, RecordKind};
pub use recovery::{JournalCut, JournalRecovery, LoadedSnapshot, RecoveryEnd, RecoveryError};
pub use removed::RemovedFiles;
pub use repair::JournalRepair;
pub use upkeep::{DurableHook, JournalStatus, SnapshotWriter};
pub use writer::{JournalSync, JournalWriter};
