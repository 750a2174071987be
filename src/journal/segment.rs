//! One segment: a file of fixed length that begins with a header and continues with records.
//!
//! A segment is allocated with all its space, mapped, and zero (a *spare*). It gets its header when the writer begins to
//! use it. Begin at [`SegmentFile::allocate`] and [`SegmentHeader::decode`].
//!
//! Only this file of the crate has unsafe code, for the mapping. Nothing else maps or shortens the file while it is
//! mapped: the folder is locked, and a segment is shortened after its mapping has been dropped.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;

use memmap2::MmapMut;

use crate::record::crc32c;

/// The length of the header of a segment.
pub(crate) const SEGMENT_HEADER_BYTES: usize = 64;

const MAGIC: [u8; 8] = *b"MUSTRSEG";

/// The header of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    /// The id of the folder.
    pub folder: u64,
    /// The number of the first record of the segment.
    pub first_record: u64,
    /// All records below this number were durable when the segment was begun.
    pub durable: u64,
    /// The boot of the kernel under which the segment was written.
    pub boot: [u8; 16],
    /// Whether records before the first one could not be written.
    pub follows_gap: bool,
}

impl SegmentHeader {
    /// Encodes the header.
    pub(crate) fn encode(&self) -> [u8; SEGMENT_HEADER_BYTES] {
        let mut bytes = [0; SEGMENT_HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[12] = u8::from(self.follows_gap);
        bytes[16..24].copy_from_slice(&self.folder.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.first_record.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.durable.to_le_bytes());
        bytes[40..56].copy_from_slice(&self.boot);
        let checksum = crc32c(&bytes[12..]);
        bytes[8..12].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Decodes the header at the beginning of `bytes`; `None` if there is no valid one.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let header: &[u8; SEGMENT_HEADER_BYTES] = bytes.first_chunk()?;
        let number = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&header[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let mut boot = [0; 16];
        boot.copy_from_slice(&header[40..56]);
        let decoded = Self {
            folder: number(16),
            first_record: number(24),
            durable: number(32),
            boot,
            follows_gap: header[12] == 1,
        };
        (decoded.encode() == *header).then_some(decoded)
    }
}

/// A segment that is mapped for writing.
pub(crate) struct SegmentFile {
    file: Arc<File>,
    map: MmapMut,
    used: usize,
}

impl SegmentFile {
    /// Creates a spare segment of `bytes` bytes at `path`, with all its space on the disk.
    ///
    /// # Errors
    /// If the file system has no room, or refuses.
    pub(crate) fn allocate(path: &Path, bytes: usize) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        let allocated =
            match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes as u64) {
                // The file system cannot allocate without writing, as some network file systems.
                Err(rustix::io::Errno::OPNOTSUPP) => write_zeroes(&file, bytes),
                allocated => allocated.map_err(io::Error::from),
            };
        let mapped = allocated.and_then(|()| map_whole(&file));
        match mapped {
            Ok(map) => Ok(Self { file: Arc::new(file), map, used: 0 }),
            Err(error) => {
                // The space goes back at once: others may need what is left of it.
                let _ = std::fs::remove_file(path);
                Err(error)
            }
        }
    }

    /// Writes the header. Records follow it.
    pub(crate) fn begin(&mut self, header: &SegmentHeader) {
        self.map[..SEGMENT_HEADER_BYTES].copy_from_slice(&header.encode());
        self.used = SEGMENT_HEADER_BYTES;
    }

    /// Returns the unused rest.
    pub(crate) fn unused(&mut self) -> &mut [u8] {
        &mut self.map[self.used..]
    }

    /// Counts `bytes` of the rest as used.
    pub(crate) fn advance(&mut self, bytes: usize) {
        self.used = (self.used + bytes).min(self.map.len());
    }

    /// Returns the file, by which another thread writes the segment to the disk.
    pub(crate) fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Ends the mapping and gives the unused space back.
    ///
    /// # Errors
    /// If the file cannot be shortened.
    pub(crate) fn finish(self) -> io::Result<()> {
        let Self { file, map, used } = self;
        drop(map);
        file.set_len(used as u64)?;
        file.sync_data()
    }
}

fn write_zeroes(mut file: &File, bytes: usize) -> io::Result<()> {
    static PART: [u8; 1 << 16] = [0; 1 << 16];
    let mut left = bytes;
    while left > 0 {
        let part = left.min(PART.len());
        file.write_all(&PART[..part])?;
        left -= part;
    }
    Ok(())
}

#[expect(unsafe_code, reason = "see the head of the file")]
fn map_whole(file: &File) -> io::Result<MmapMut> {
    // SAFETY: the file was just created in a folder that this process has locked, and has its full length. Other code of
    // this process reaches the bytes by this mapping only, until it is dropped.
    unsafe { MmapMut::map_mut(file) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_back_and_every_changed_bit_is_noticed() {
        let header =
            SegmentHeader { folder: 3, first_record: 9, durable: 8, boot: [7; 16], follows_gap: true };
        let bytes = header.encode();
        assert_eq!(SegmentHeader::decode(&bytes), Some(header));
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SegmentHeader::decode(&changed), None, "bit {bit}");
        }
        assert_eq!(SegmentHeader::decode(&bytes[..63]), None);
        assert_eq!(SegmentHeader::decode(&[0; 64]), None);
    }

    #[test]
    fn no_room_leaves_no_file() {
        let folder = crate::folder::TestFolder::new();
        let path = folder.0.join("segment-1");
        assert!(SegmentFile::allocate(&path, 1 << 60).is_err());
        assert!(!path.exists());
    }
}
