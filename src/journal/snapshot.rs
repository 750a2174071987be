//! Snapshot files: a header, and the state as its user wrote it. Begin at [`write_snapshot`] and [`read_snapshot`].
//!
//! A snapshot is written under another name, written to the disk, and then renamed. So a file named `snapshot-R` is
//! complete, unless the disk has damaged it; the checksum in its header shows that.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..8 | `MUSTRSNP` |
//! | 8..16 | id of the folder |
//! | 16..24 | number of the first record that the state does not contain |
//! | 24..32 | length of the state |
//! | 32..40 | CRC-64 (NVMe) of the bytes 0..32 and of the state |

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use crc_fast::{CrcAlgorithm, Digest};

const MAGIC: [u8; 8] = *b"MUSTRSNP";
const HEADER_BYTES: usize = 40;

/// A writer that counts and checks what passes.
struct ChecksummingWriter<W> {
    inner: W,
    digest: Digest,
    bytes: u64,
}

impl<W: Write> Write for ChecksummingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.digest.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn header_without_checksum(folder: u64, record: u64, bytes: u64) -> [u8; HEADER_BYTES - 8] {
    let mut header = [0; HEADER_BYTES - 8];
    header[..8].copy_from_slice(&MAGIC);
    header[8..16].copy_from_slice(&folder.to_le_bytes());
    header[16..24].copy_from_slice(&record.to_le_bytes());
    header[24..32].copy_from_slice(&bytes.to_le_bytes());
    header
}

/// Combines the checksum of a header with the checksum of a state.
fn checksum_of_snapshot(header: &[u8], state: u64) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &[header, &state.to_le_bytes()].concat())
}

/// Writes a snapshot to `path`, and returns the length of its state. The file has its name only once it is complete and on
/// the disk.
pub(crate) fn write_snapshot(
    path: &Path,
    folder: u64,
    record: u64,
    state: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<u64> {
    let unfinished = path.with_extension("new");
    let written = (|| {
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
        file.write_all(&[0; HEADER_BYTES])?;
        let digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        let mut out =
            ChecksummingWriter { inner: BufWriter::with_capacity(1 << 18, &file), digest, bytes: 0 };
        state(&mut out)?;
        out.flush()?;
        let (bytes, checksum) = (out.bytes, out.digest.finalize());
        drop(out);
        let header = header_without_checksum(folder, record, bytes);
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&header)?;
        file.write_all(&checksum_of_snapshot(&header, checksum).to_le_bytes())?;
        file.sync_all()?;
        fs::rename(&unfinished, path)?;
        if let Some(folder) = path.parent() {
            File::open(folder)?.sync_all()?;
        }
        Ok(bytes)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    written
}

/// Reads the state of a snapshot.
///
/// # Errors
/// In words, if the file cannot be read or is damaged.
pub(crate) fn read_snapshot(path: &Path, folder: u64, record: u64) -> Result<Vec<u8>, String> {
    let mut bytes = fs::read(path).map_err(|error| error.to_string())?;
    let Some((header, state)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Err("it is too short".to_owned());
    };
    let expected = header_without_checksum(folder, record, state.len() as u64);
    if header[..HEADER_BYTES - 8] != expected {
        return Err("its header is damaged or belongs to another journal".to_owned());
    }
    let checksum = crc_fast::checksum(CrcAlgorithm::Crc64Nvme, state);
    if header[HEADER_BYTES - 8..] != checksum_of_snapshot(&expected, checksum).to_le_bytes() {
        return Err("its contents are damaged".to_owned());
    }
    bytes.drain(..HEADER_BYTES);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::TestFolder;

    #[test]
    fn a_snapshot_comes_back_and_every_changed_byte_is_noticed() {
        let folder = TestFolder::new();
        let path = folder.0.join("snapshot-0000000000000007");
        let state: Vec<u8> = (0..600_u32).flat_map(u32::to_le_bytes).collect();
        let written =
            write_snapshot(&path, 1, 7, |out| state.chunks(100).try_for_each(|part| out.write_all(part)));
        assert_eq!(written.unwrap(), 2400);
        assert_eq!(read_snapshot(&path, 1, 7).unwrap(), state);
        assert!(read_snapshot(&path, 2, 7).is_err(), "a snapshot of another folder");
        assert!(read_snapshot(&path, 1, 8).is_err(), "a snapshot of another record");
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 0x10;
            fs::write(&path, &changed).unwrap();
            assert!(read_snapshot(&path, 1, 7).is_err(), "byte {at}");
        }
        for length in [0, 39, 40, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            assert!(read_snapshot(&path, 1, 7).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn a_snapshot_that_fails_leaves_nothing() {
        let folder = TestFolder::new();
        let path = folder.0.join("snapshot-0000000000000001");
        let failed = write_snapshot(&path, 1, 1, |_| Err(io::Error::other("no more room")));
        assert!(failed.is_err());
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0);
    }
}
