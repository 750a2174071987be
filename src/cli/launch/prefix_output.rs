//! Merges the output of many processes into one stream, line by line, and prefixes each line with its task.
//!
//! Begin at `SharedOutput`.

use std::io::Write;
use std::thread::JoinHandle;

use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::sync::mpsc;

use super::super::output::error_text;

/// The maximum length of a line, in bytes. A longer one is split, so that a process without line ends cannot
/// fill the memory.
const LINE_BYTES_MAX: usize = 64 << 10;
/// The number of bytes of one read.
const CHUNK_BYTES: usize = 32 << 10;
/// The maximum number of queued pieces. When it is reached, the processes block.
const PIECES_WAITING: usize = 64;

/// An output stream with many writers. A thread of its own writes to it: a terminal that is stopped must
/// block the processes, but not the server beside them.
pub struct SharedOutput {
    pieces: mpsc::Sender<Vec<u8>>,
    thread: JoinHandle<()>,
}

impl SharedOutput {
    /// Starts the thread that writes to `out`.
    pub fn start(mut out: impl Write + Send + 'static) -> Self {
        let (pieces, mut waiting) = mpsc::channel::<Vec<u8>>(PIECES_WAITING);
        let thread = std::thread::spawn(move || {
            let mut open = true;
            while let Some(piece) = waiting.blocking_recv() {
                // When the reader is gone, the processes still run to their end.
                open = open && out.write_all(&piece).and_then(|()| out.flush()).is_ok();
            }
        });
        Self { pieces, thread }
    }

    /// Returns the sender for whole lines.
    pub fn line_sender(&self) -> mpsc::Sender<Vec<u8>> {
        self.pieces.clone()
    }

    /// Writes a line of the launch itself.
    pub async fn write_launch_line(&self, line: &str) {
        let _ = self.pieces.send(error_text(line).into_bytes()).await;
    }

    /// Writes the remaining pieces and ends. All other senders must be dropped.
    pub async fn finish(self) {
        drop(self.pieces);
        let _ = tokio::task::spawn_blocking(|| self.thread.join()).await;
    }
}

/// Forwards the output of a process until it closes its end.
pub async fn forward_prefixed_lines(mut from: impl AsyncRead + Unpin, task: u32, to: mpsc::Sender<Vec<u8>>) {
    let mut lines = LinePrefixer::new(task);
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let mut whole = Vec::new();
        match from.read(&mut chunk).await {
            Ok(0) | Err(_) => {
                lines.write_unfinished_line(&mut whole);
                let _ = to.send(whole).await;
                return;
            }
            Ok(read) => lines.add_bytes(&chunk[..read], &mut whole),
        }
        if !whole.is_empty() && to.send(whole).await.is_err() {
            return;
        }
    }
}

/// Cuts bytes into lines and puts the task's number before each.
struct LinePrefixer {
    prefix: Vec<u8>,
    begun: Vec<u8>,
}

impl LinePrefixer {
    fn new(task: u32) -> Self {
        Self { prefix: format!("[{task}] ").into_bytes(), begun: Vec::new() }
    }

    fn add_bytes(&mut self, mut bytes: &[u8], whole: &mut Vec<u8>) {
        while !bytes.is_empty() {
            let room = LINE_BYTES_MAX - self.begun.len();
            let end = bytes.iter().position(|&byte| byte == b'\n');
            match end {
                Some(end) if end <= room => {
                    self.write_line(&bytes[..end], whole);
                    bytes = &bytes[end + 1..];
                }
                _ if bytes.len() >= room => {
                    self.write_line(&bytes[..room], whole);
                    bytes = &bytes[room..];
                }
                _ => {
                    self.begun.extend_from_slice(bytes);
                    bytes = &[];
                }
            }
        }
    }

    fn write_line(&mut self, rest: &[u8], whole: &mut Vec<u8>) {
        whole.extend_from_slice(&self.prefix);
        whole.append(&mut self.begun);
        whole.extend_from_slice(rest);
        whole.push(b'\n');
    }

    fn write_unfinished_line(&mut self, whole: &mut Vec<u8>) {
        if !self.begun.is_empty() {
            self.write_line(&[], whole);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix_lines_of_chunks(chunks: &[&[u8]]) -> Vec<u8> {
        let mut lines = LinePrefixer::new(7);
        let mut whole = Vec::new();
        for chunk in chunks {
            lines.add_bytes(chunk, &mut whole);
        }
        lines.write_unfinished_line(&mut whole);
        whole
    }

    #[test]
    fn every_line_gets_its_number_however_it_arrives() {
        assert_eq!(prefix_lines_of_chunks(&[b"a\nb", b"c\n", b"\n", b"d"]), b"[7] a\n[7] bc\n[7] \n[7] d\n");
        assert_eq!(prefix_lines_of_chunks(&[b"\xff\x00\n"]), b"[7] \xff\x00\n");
        assert_eq!(prefix_lines_of_chunks(&[b""]), b"");
    }

    #[test]
    fn a_line_without_end_is_broken() {
        let long = vec![b'x'; LINE_BYTES_MAX * 2 + 5];
        let pieces: Vec<usize> =
            prefix_lines_of_chunks(&[&long, b"\n"]).split(|&b| b == b'\n').map(<[u8]>::len).collect();
        assert_eq!(pieces, [LINE_BYTES_MAX + 4, LINE_BYTES_MAX + 4, 9, 0]);
    }
}
