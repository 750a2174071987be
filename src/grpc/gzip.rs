//! Inflates gzip messages. A gzip file states its inflated length, so the bound on the output is known before the
//! first byte is inflated.
//!
//! `request_body.rs` decides on which thread a message is inflated. Begin at [`GzipFile::parse`].

use std::cell::RefCell;

use libdeflater::{DecompressionError, Decompressor, crc32};

use crate::coordination::{Code, Failure};

thread_local! {
    /// The decompressor's tables are large compared to the usual message, so each thread sets them up once.
    static INFLATER: RefCell<Decompressor> = RefCell::new(Decompressor::new());
}

const TEXT: u8 = 1;
const HEADER_CHECKSUM: u8 = 2;
const EXTRA: u8 = 4;
const NAME: u8 = 8;
const COMMENT: u8 = 16;
const TRAILER: usize = 8;
/// The greatest ratio of deflate, rounded up.
const RATIO: usize = 1040;

/// A gzip file with a valid header.
#[derive(Debug)]
pub(super) struct GzipFile<'a> {
    deflated: &'a [u8],
    /// The stated checksum of the message.
    pub(super) checksum: u32,
    /// The stated length of the inflated message. More output than that is an error.
    pub(super) length: usize,
}

fn corrupt_gzip_failure(what: &str) -> Failure {
    Failure::without_details(Code::Internal, format!("the request's gzip compression is broken: {what}"))
}

impl<'a> GzipFile<'a> {
    /// Parses the frame of a gzip file.
    pub(super) fn parse(file: &'a [u8]) -> Result<Self, Failure> {
        let short = || corrupt_gzip_failure("it is cut short");
        let [0x1f, 0x8b, 8, flags, _, _, _, _, _, _, rest @ ..] = file else {
            return Err(corrupt_gzip_failure("it does not begin like gzip"));
        };
        if flags & !(TEXT | HEADER_CHECKSUM | EXTRA | NAME | COMMENT) != 0 {
            return Err(corrupt_gzip_failure("its header has unknown flags"));
        }
        let mut rest = rest;
        if flags & EXTRA != 0 {
            let [low, high, after @ ..] = rest else { return Err(short()) };
            let length = usize::from(u16::from_le_bytes([*low, *high]));
            rest = after.get(length..).ok_or_else(short)?;
        }
        for text in [NAME, COMMENT] {
            if flags & text != 0 {
                let end = rest.iter().position(|&byte| byte == 0).ok_or_else(short)?;
                rest = rest.get(end + 1..).ok_or_else(short)?;
            }
        }
        if flags & HEADER_CHECKSUM != 0 {
            rest = rest.get(2..).ok_or_else(short)?;
        }
        let Some((deflated, trailer)) = rest.split_last_chunk::<TRAILER>() else { return Err(short()) };
        let [c0, c1, c2, c3, l0, l1, l2, l3] = *trailer;
        let checksum = u32::from_le_bytes([c0, c1, c2, c3]);
        let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if length / RATIO > deflated.len() {
            return Err(corrupt_gzip_failure("it states a length that nothing so short inflates to"));
        }
        Ok(Self { deflated, checksum, length })
    }

    /// Inflates the message and checks its stated length and checksum, which are at the end of the file.
    pub(super) fn inflate(&self) -> Result<Vec<u8>, Failure> {
        let mut message = Vec::new();
        if message.try_reserve_exact(self.length).is_err() {
            return Err(Failure::without_details(
                Code::ResourceExhausted,
                "there is no memory to inflate the request in",
            ));
        }
        message.resize(self.length, 0);
        let inflated = INFLATER.with_borrow_mut(|it| it.deflate_decompress(self.deflated, &mut message));
        match inflated {
            Ok(length) if length == self.length => {}
            Ok(_) | Err(DecompressionError::InsufficientSpace) => {
                return Err(corrupt_gzip_failure("its length is not the one it states"));
            }
            Err(DecompressionError::BadData) => {
                return Err(corrupt_gzip_failure("its contents do not inflate"));
            }
        }
        if crc32(&message) != self.checksum {
            return Err(corrupt_gzip_failure("its checksum does not match"));
        }
        Ok(message)
    }
}

#[cfg(test)]
pub(super) fn compress(message: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(message).expect("memory takes it all");
    encoder.finish().expect("memory takes it all")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inflating_restores_the_message() {
        for message in [&b""[..], b"a", &[7; 100_000], &(0..=255).cycle().take(70_000).collect::<Vec<u8>>()] {
            let file = compress(message);
            let gzip = GzipFile::parse(&file).unwrap();
            assert_eq!(gzip.length, message.len());
            assert_eq!(gzip.inflate().unwrap(), message);
        }
        let mut named = flate2::GzBuilder::new()
            .filename("n")
            .comment("c")
            .extra(vec![1, 2, 3])
            .write(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut named, b"text").unwrap();
        assert_eq!(GzipFile::parse(&named.finish().unwrap()).unwrap().inflate().unwrap(), b"text");
    }

    #[test]
    fn a_false_length_or_checksum_is_refused() {
        let good = compress(&[1; 5_000]);
        let at = |i: usize, to: u8| {
            let mut file = good.clone();
            let i = if i < 100 { i } else { file.len() - (200 - i) };
            file[i] = to;
            GzipFile::parse(&file).map(|gzip| gzip.inflate()).and_then(|inner| inner)
        };
        assert!(at(0, 1).is_err(), "no gzip");
        assert!(at(3, 0x80).is_err(), "unknown flag");
        assert!(at(196, 1).is_err(), "length too small");
        assert!(at(197, 0x70).is_err(), "length too large");
        assert!(at(192, good[good.len() - 8] ^ 1).is_err(), "checksum");
        for length in 0..good.len() {
            let cut = GzipFile::parse(&good[..length]).and_then(|gzip| {
                if gzip.length < 1 << 20 { gzip.inflate() } else { Err(corrupt_gzip_failure("")) }
            });
            assert!(cut.is_err(), "cut to {length}");
        }
        let more = [good, b"and more".to_vec()].concat();
        assert!(GzipFile::parse(&more).and_then(|gzip| gzip.inflate()).is_err(), "one message a file");
    }
}
