//! The Huffman code of HPACK (RFC 7541, appendix B).
//!
//! The code is canonical: codes of one length count up in the order of their symbols, and the lengths say it all.

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

/// What is needed to read canonical codes: for each length, its first code, how many there are, and where their symbols stand.
struct Canon {
    first: [u32; LONGEST + 1],
    count: [u32; LONGEST + 1],
    start: [usize; LONGEST + 1],
    symbols: [u16; 257],
}

static CANON: Canon = canon();

const fn canon() -> Canon {
    let mut canon = Canon {
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

/// Decodes a string, which may have `most` bytes; `None` if it is not in order or too long.
pub(super) fn decode(coded: &[u8], most: usize) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(coded.len().saturating_mul(8) / 5);
    let (mut code, mut length) = (0_u32, 0_usize);
    for byte in coded {
        for bit in (0..8).rev() {
            code = code << 1 | u32::from(byte >> bit & 1);
            length += 1;
            let (Some(first), Some(count)) = (CANON.first.get(length), CANON.count.get(length)) else {
                return None;
            };
            let place = code.wrapping_sub(*first);
            if place >= *count {
                continue;
            }
            let symbol = *CANON.symbols.get(CANON.start.get(length)? + place as usize)?;
            if symbol == END || text.len() == most {
                return None;
            }
            text.push(symbol as u8);
            (code, length) = (0, 0);
        }
    }
    // What is left over is padding: fewer than eight bits, all ones.
    (length < 8 && code + 1 == 1 << length).then_some(text)
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
            assert_eq!(decode(coded, 100).as_deref(), Some(text.as_bytes()));
        }
        assert_eq!(decode(&[0x64, 0x02], 2), None, "too long");
        assert_eq!(decode(&[0xff; 4], 100), None, "the end of the string, spelled out");
        assert_eq!(decode(&[0xae, 0xc3, 0x77, 0x1a, 0x4b, 0xff], 100), None, "a whole byte of padding");
        assert_eq!(decode(&[0x00], 100), None, "padding of zeros");
    }
}
