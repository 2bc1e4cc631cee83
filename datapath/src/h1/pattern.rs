//! Pure: texts that the slow path compares byte by byte. Constants are values of `Http1Direction::pattern`.

pub(super) const HEAD: u8 = 1;
pub(super) const CONNECT: u8 = 2;
pub(super) const HTTP2: u8 = 3;
pub(super) const VERSION: u8 = 4;
pub(super) const LENGTH: u8 = 5;
pub(super) const CODING: u8 = 6;
pub(super) const CONNECTION: u8 = 7;
pub(super) const CHUNKED: u8 = 8;
pub(super) const CLOSE: u8 = 9;
pub(super) const SETTINGS: u8 = 10;

/// Returns the bytes of a text, the first one lowest. No text is longer than 24 bytes.
#[inline(always)]
const fn pattern_words(name: u8) -> [u64; 3] {
    const fn pack(text: &[u8; 24]) -> [u64; 3] {
        let mut out = [0; 3];
        let mut index = 0;
        while index < 24 {
            out[index / 8] |= (text[index] as u64) << (index % 8 * 8);
            index += 1;
        }
        out
    }
    match name {
        HEAD => const { pack(b"HEAD \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        CONNECT => const { pack(b"CONNECT \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        HTTP2 => const { pack(b"PRI * HT\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        VERSION => const { pack(b"HTTP/1.\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        LENGTH => const { pack(b"content-length:\0\0\0\0\0\0\0\0\0") },
        CODING => const { pack(b"transfer-encoding:\0\0\0\0\0\0") },
        CONNECTION => const { pack(b"connection:\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        CHUNKED => const { pack(b"chunked\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        CLOSE => const { pack(b"close\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") },
        _ => [0; 3],
    }
}

/// Returns byte `index` of a text; 0 behind its end.
#[inline(always)]
pub(super) fn pattern_byte(name: u8, index: u8) -> u8 {
    let [first, second, third] = pattern_words(name);
    let word = match index >> 3 {
        0 => first,
        1 => second,
        2 => third,
        _ => 0,
    };
    (word >> ((index & 7) * 8)) as u8
}
