//! Encodes requests and decodes responses by hand. Generated encoders would take processor time that the server
//! under test needs.
//!
//! The messages are those of generation C (`proto/xla_coordination.proto`).

use std::io::Write as _;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use flate2::write::{DeflateEncoder, GzEncoder};
use flate2::{Compression, Crc};

/// The measured calls of the coordination service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    RegisterTask,
    Heartbeat,
    ShutdownTask,
    WatchTasks,
    InsertKeyValue,
    GetKeyValue,
    TryGetKeyValue,
    GetKeyValueDir,
    DeleteKeyValue,
    Barrier,
    GetAliveTasks,
    PollForError,
}

impl Method {
    pub const ALL: [Self; 12] = [
        Self::RegisterTask,
        Self::Heartbeat,
        Self::ShutdownTask,
        Self::WatchTasks,
        Self::InsertKeyValue,
        Self::GetKeyValue,
        Self::TryGetKeyValue,
        Self::GetKeyValueDir,
        Self::DeleteKeyValue,
        Self::Barrier,
        Self::GetAliveTasks,
        Self::PollForError,
    ];

    pub fn path(self) -> String {
        format!("/xla.coordination.CoordinationService/{self:?}")
    }
}

/// A protobuf message in the making.
#[derive(Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    pub fn varint(mut self, field: u32, value: u64) -> Self {
        // Proto3 omits a field with its default value.
        if value != 0 {
            put_varint(&mut self.0, u64::from(field << 3));
            put_varint(&mut self.0, value);
        }
        self
    }

    pub fn fixed64(mut self, field: u32, value: u64) -> Self {
        put_varint(&mut self.0, u64::from(field << 3 | 1));
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub fn bytes(self, field: u32, value: &[u8]) -> Self {
        let mut field = self.bytes_head(field, value.len());
        field.0.extend_from_slice(value);
        field
    }

    /// Appends the tag and the length of a bytes field whose bytes are sent separately.
    pub fn bytes_head(mut self, field: u32, length: usize) -> Self {
        put_varint(&mut self.0, u64::from(field << 3 | 2));
        put_varint(&mut self.0, length as u64);
        self
    }

    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// One field of a message that was received.
#[derive(Debug, PartialEq, Eq)]
pub enum Value<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message, in order.
pub struct Fields<'a>(&'a [u8]);

pub fn fields(message: &[u8]) -> Fields<'_> {
    Fields(message)
}

impl<'a> Fields<'a> {
    fn take_varint(&mut self) -> Result<u64> {
        let mut value = 0_u64;
        for shift in (0..70).step_by(7) {
            let (&byte, rest) = self.0.split_first().context("a varint is cut short")?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte < 0x80 {
                return Ok(value);
            }
        }
        bail!("a varint of more than ten bytes")
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length).context("a field is cut short")?;
        self.0 = rest;
        Ok(taken)
    }

    fn take_field(&mut self) -> Result<(u32, Value<'a>)> {
        let key = self.take_varint()?;
        let value = match key & 7 {
            0 => Value::Varint(self.take_varint()?),
            1 => Value::Fixed64(u64::from_le_bytes(self.take(8)?.try_into()?)),
            2 => {
                let length = usize::try_from(self.take_varint()?)?;
                Value::Bytes(self.take(length)?)
            }
            other => bail!("wire type {other} in an answer"),
        };
        Ok((u32::try_from(key >> 3)?, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, Value<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() { None } else { Some(self.take_field()) }
    }
}

/// Returns the numbers of a packed repeated varint field.
pub fn packed(bytes: &[u8]) -> Result<Vec<u64>> {
    let mut rest = Fields(bytes);
    let mut numbers = Vec::new();
    while !rest.0.is_empty() {
        numbers.push(rest.take_varint()?);
    }
    Ok(numbers)
}

pub fn pack(numbers: impl IntoIterator<Item = u64>) -> Vec<u8> {
    let mut out = Vec::new();
    for number in numbers {
        put_varint(&mut out, number);
    }
    out
}

/// The length of gRPC's message prefix: a flag and the length.
pub const PREFIX: usize = 5;

/// Returns an uncompressed message with gRPC's prefix.
pub fn frame(message: &[u8]) -> Bytes {
    prefixed(0, message)
}

/// Returns a message as a channel with gzip sends it: compressed if that makes it smaller.
pub fn frame_compressed(message: &[u8]) -> Result<Bytes> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(message)?;
    let packed = encoder.finish()?;
    Ok(if packed.len() < message.len() { prefixed(1, &packed) } else { prefixed(0, message) })
}

/// The common end of many messages, compressed once for all of them: thousands of tasks each send the same
/// long list.
pub struct SharedEnd {
    plain: Vec<u8>,
    deflated: Vec<u8>,
    checksum: Crc,
}

impl SharedEnd {
    pub fn new(plain: Vec<u8>) -> Result<Self> {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(&plain)?;
        let mut checksum = Crc::new();
        checksum.update(&plain);
        Ok(Self { deflated: encoder.finish()?, plain, checksum })
    }

    /// Returns a whole message with gRPC's prefix: compressed if that makes it smaller.
    fn frame_after(&self, start: &[u8]) -> Bytes {
        let mut checksum = Crc::new();
        checksum.update(start);
        checksum.combine(&self.checksum);
        // The header of a gzip file, then the beginning as a stored block.
        let mut packed = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 0];
        let length = start.len() as u16;
        packed.extend_from_slice(&length.to_le_bytes());
        packed.extend_from_slice(&(!length).to_le_bytes());
        packed.extend_from_slice(start);
        packed.extend_from_slice(&self.deflated);
        packed.extend_from_slice(&checksum.sum().to_le_bytes());
        packed.extend_from_slice(&checksum.amount().to_le_bytes());
        let whole = [start, &self.plain].concat();
        if packed.len() < whole.len() { prefixed(1, &packed) } else { prefixed(0, &whole) }
    }
}

fn prefixed(flag: u8, message: &[u8]) -> Bytes {
    let mut out = Vec::with_capacity(PREFIX + message.len());
    out.push(flag);
    out.extend_from_slice(&(message.len() as u32).to_be_bytes());
    out.extend_from_slice(message);
    out.into()
}

/// Returns the message of one uncompressed gRPC frame.
pub fn unframe(body: Bytes) -> Result<Bytes> {
    if body.is_empty() {
        return Ok(body);
    }
    ensure!(body.len() >= PREFIX, "a gRPC frame of {} bytes", body.len());
    ensure!(body[0] == 0, "a compressed answer");
    let length = u32::from_be_bytes(body[1..PREFIX].try_into()?) as usize;
    ensure!(body.len() == PREFIX + length, "a frame of {length} bytes in {} bytes", body.len());
    Ok(body.slice(PREFIX..))
}

/// Returns the beginning of every request but registration: the incarnations of the caller and of the
/// service. Released agents omit the task's number.
fn incarnations(task: u64, service: u64) -> Vec<u8> {
    Writer::default().fixed64(2, task).fixed64(3, service).finish()
}

/// One incarnation of a task, as its requests name it.
#[derive(Debug, Clone, Copy)]
pub struct Speaker {
    pub task: u32,
    pub incarnation: u64,
    pub service: u64,
}

impl Speaker {
    fn request(&self) -> Writer {
        Writer::default().bytes(1, &incarnations(self.incarnation, self.service))
    }

    pub fn register(&self) -> Bytes {
        frame(&Writer::default().fixed64(3, self.incarnation).varint(5, self.task.into()).finish())
    }

    pub fn heartbeat(&self) -> Bytes {
        frame(&self.request().fixed64(2, self.incarnation).varint(3, self.task.into()).finish())
    }

    /// Returns a request that names only its caller: `PollForError` and `ShutdownTask`.
    pub fn only_who(&self) -> Bytes {
        frame(&self.request().varint(2, self.task.into()).finish())
    }

    pub fn watch(&self, version: i64) -> Bytes {
        frame(&self.request().varint(2, version.cast_unsigned()).finish())
    }

    /// Returns an arrival at a barrier of all tasks.
    pub fn barrier(&self, id: &str, timeout_ms: u64, counter: u64) -> Bytes {
        let request = self.request().bytes(2, id.as_bytes()).varint(3, timeout_ms);
        frame(&request.varint(5, self.task.into()).varint(6, counter).finish())
    }

    pub fn live_set(&self, tasks: &SharedEnd) -> Bytes {
        tasks.frame_after(&self.request().varint(2, self.task.into()).finish())
    }

    fn insert_message(&self, key: &str, value: &[u8]) -> Vec<u8> {
        let entry = Writer::default().bytes(1, key.as_bytes()).bytes(2, value).finish();
        self.request().bytes(2, &entry).finish()
    }

    /// Returns an insert of a value that does not compress.
    pub fn insert(&self, key: &str, value: &[u8]) -> Bytes {
        frame(&self.insert_message(key, value))
    }

    /// Returns an insert of a value that may compress.
    pub fn insert_compressed(&self, key: &str, value: &[u8]) -> Result<Bytes> {
        frame_compressed(&self.insert_message(key, value))
    }

    /// Returns a request that names only a key or a directory.
    pub fn key(&self, key: &str) -> Bytes {
        frame(&self.request().bytes(2, key.as_bytes()).finish())
    }

    pub fn delete(&self, key: &str) -> Bytes {
        frame(&self.request().bytes(2, key.as_bytes()).varint(3, 1).finish())
    }
}
