//! Decodes the Huffman code of HPACK (RFC 7541, appendix B). No encoder is needed, because the server sends strings
//! without the Huffman code.
//!
//! The code is canonical: among codes of the same length, the codes ascend with their symbols. So the list of code
//! lengths defines the whole code. Begin at `decode_huffman`.

/// The length of each symbol's code in bits. The last symbol is the end of the string, which is never sent.
#[rustfmt::skip]
const LENGTHS: [u8; 257] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5,
    6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
];

const LONGEST: usize = 30;
const END: u16 = 256;

/// The decoding table of a canonical code: for each length, its first code, the number of codes, and the
/// position of their symbols.
struct CanonicalCode {
    first: [u32; LONGEST + 1],
    count: [u32; LONGEST + 1],
    start: [usize; LONGEST + 1],
    symbols: [u16; 257],
}

static CANON: CanonicalCode = CANONICAL;

const CANONICAL: CanonicalCode = build_canonical_code();

const fn build_canonical_code() -> CanonicalCode {
    let mut canon = CanonicalCode {
        first: [0; LONGEST + 1],
        count: [0; LONGEST + 1],
        start: [0; LONGEST + 1],
        symbols: [0; 257],
    };
    let (mut length, mut code, mut place) = (1, 0, 0);
    while length <= LONGEST {
        code <<= 1;
        canon.first[length] = code;
        canon.start[length] = place;
        let mut symbol = 0;
        while symbol < LENGTHS.len() {
            if LENGTHS[symbol] as usize == length {
                canon.symbols[place] = symbol as u16;
                place += 1;
                code += 1;
            }
            symbol += 1;
        }
        canon.count[length] = code - canon.first[length];
        length += 1;
    }
    canon
}

/// The symbols with codes of at most eight bits, by the next eight bits, with the lengths of their codes; 0
/// if the code is longer. Nearly all header text consists of these.
static SHORT_CODES: [(u8, u8); 256] = build_short_code_table();

const fn build_short_code_table() -> [(u8, u8); 256] {
    let mut short = [(0, 0); 256];
    let mut bits = 0;
    while bits < short.len() {
        let mut length = 1;
        while length <= 8 {
            let place = (bits >> (8 - length)) as u32;
            if place >= CANONICAL.first[length] && place - CANONICAL.first[length] < CANONICAL.count[length] {
                let symbol =
                    CANONICAL.symbols[CANONICAL.start[length] + (place - CANONICAL.first[length]) as usize];
                short[bits] = (symbol as u8, length as u8);
                break;
            }
            length += 1;
        }
        bits += 1;
    }
    short
}

/// Decodes a string of at most `most` bytes; returns `None` if it is malformed or too long.
pub(super) fn decode_huffman(coded: &[u8], most: usize) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(coded.len().saturating_mul(8) / 5);
    // The next bits, left-aligned, and their number.
    let (mut bits, mut there) = (0_u64, 0_usize);
    let mut coded = coded.iter();
    loop {
        while there <= 56
            && let Some(byte) = coded.next()
        {
            bits |= u64::from(*byte) << (56 - there);
            there += 8;
        }
        let (symbol, length) = match SHORT_CODES.get((bits >> 56) as usize)? {
            (_, 0) => match decode_long_symbol(bits, there) {
                Some(found) => found,
                None => break,
            },
            (symbol, length) => (u16::from(*symbol), usize::from(*length)),
        };
        if length > there {
            break;
        }
        if symbol == END || text.len() == most {
            return None;
        }
        text.push(symbol as u8);
        bits <<= length;
        there -= length;
    }
    // The rest must be padding: fewer than eight bits, all ones.
    (there < 8 && bits == !(u64::MAX >> there)).then_some(text)
}

/// Returns the next symbol and the length of its code, if that has more than eight bits and is complete.
fn decode_long_symbol(bits: u64, there: usize) -> Option<(u16, usize)> {
    (9..=LONGEST.min(there)).find_map(|length| {
        let place = ((bits >> (64 - length)) as u32).wrapping_sub(*CANON.first.get(length)?);
        if place >= *CANON.count.get(length)? {
            return None;
        }
        Some((*CANON.symbols.get(CANON.start.get(length)? + place as usize)?, length))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_of_the_standard() {
        // RFC 7541, C.4 and C.6.
        for (coded, text) in [
            (
                &[0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff][..],
                "www.example.com",
            ),
            (&[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf], "no-cache"),
            (&[0x64, 0x02], "302"),
            (&[0xae, 0xc3, 0x77, 0x1a, 0x4b], "private"),
            (&[], ""),
        ] {
            assert_eq!(decode_huffman(coded, 100).as_deref(), Some(text.as_bytes()));
        }
        assert_eq!(decode_huffman(&[0x64, 0x02], 2), None, "too long");
        assert_eq!(decode_huffman(&[0xff; 4], 100), None, "the end of the string, spelled out");
        assert_eq!(
            decode_huffman(&[0xae, 0xc3, 0x77, 0x1a, 0x4b, 0xff], 100),
            None,
            "a whole byte of padding"
        );
        assert_eq!(decode_huffman(&[0x00], 100), None, "padding of zeros");
    }

    /// Encodes bit by bit, as the standard describes.
    fn encode_huffman(text: &[u8]) -> Vec<u8> {
        let mut bits: Vec<bool> = Vec::new();
        for byte in text {
            let length = usize::from(LENGTHS[usize::from(*byte)]);
            let shorter = CANON.symbols[CANON.start[length]..].iter();
            let place = shorter.take_while(|symbol| **symbol != u16::from(*byte)).count();
            let code = CANON.first[length] + u32::try_from(place).unwrap();
            bits.extend((0..length).rev().map(|bit| code >> bit & 1 == 1));
        }
        bits.resize(bits.len().next_multiple_of(8), true);
        bits.chunks(8).map(|byte| byte.iter().fold(0, |value, bit| value << 1 | u8::from(*bit))).collect()
    }

    #[test]
    fn every_symbol_beside_every_other_reads_back() {
        for first in 0..=255 {
            for second in 0..=255 {
                let text = [first, second, first, b'a'];
                assert_eq!(
                    decode_huffman(&encode_huffman(&text), 100).as_deref(),
                    Some(&text[..]),
                    "{text:?}"
                );
            }
        }
        for cut in 1..4 {
            assert_eq!(decode_huffman(&[0xff; 4][..cut], 100), None, "only ones, and too many");
        }
    }
}
