//! Pure: decimal numbers in texts that others write: annotations, settings, headers, lines of protocols.

use std::{num::NonZeroU16, str::FromStr};

/// Parses a number that is written with decimal digits only. `None` for any other text, and for a number that the type
/// does not hold.
///
/// The standard library accepts a `+` before the digits. Go's `strconv.ParseUint` does not. Neither do grammars with
/// `DIGIT` alone, such as those of `Content-Length` (RFC 9110 §8.6) and of ports in URIs (RFC 3986 §3.2.3).
pub fn parse_digits<T: FromStr>(text: &str) -> Option<T> {
    let has_digits_only = text.bytes().all(|byte| byte.is_ascii_digit());
    has_digits_only.then(|| text.parse().ok()).flatten()
}

/// Parses a port, 1 to 65535, as [`parse_digits`] does.
pub fn parse_port(text: &str) -> Option<NonZeroU16> {
    parse_digits(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_has_digits_only() {
        for (text, expected) in [
            ("0", Some(0)),
            ("007", Some(7)),
            ("255", Some(255)),
            ("256", None),
            ("+7", None),
            ("-7", None),
            ("", None),
            (" 7", None),
            ("7 ", None),
            ("7_0", None),
            ("0x7", None),
            // Arabic-Indic digit seven.
            ("\u{667}", None),
        ] {
            assert_eq!(parse_digits::<u8>(text), expected, "{text:?}");
        }
    }

    #[test]
    fn a_port_is_a_number_of_16_bits_but_0() {
        for (text, expected) in [
            ("1", Some(1)),
            ("65535", Some(65_535)),
            ("0", None),
            ("65536", None),
            ("+443", None),
            ("-443", None),
            ("https", None),
        ] {
            assert_eq!(parse_port(text).map(NonZeroU16::get), expected, "{text:?}");
        }
    }
}
