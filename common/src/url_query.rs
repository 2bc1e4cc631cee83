//! Pure: values in the query of a URL: percent-encoding, and the pairs of a form (WHATWG URL, section 5).

use std::fmt::Write as _;

/// Replaces each `%` with two hexadecimal digits by its byte. Other text stays as it is, and bytes that are not UTF-8
/// become U+FFFD.
pub fn decode_percent(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|it| std::str::from_utf8(it).ok());
        // A sign is no digit, though the parser of numbers accepts one.
        let is_hex = |it: &&str| it.bytes().all(|byte| byte.is_ascii_hexdigit());
        let decoded = digits.filter(is_hex).and_then(|it| u8::from_str_radix(it, 16).ok());
        match decoded.filter(|_| first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Encodes all bytes but the unreserved ones (RFC 3986, section 2.3), so that the text can be a value in a query.
pub fn encode_percent(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            // A write to a String cannot fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

/// Returns the names of a query's pairs with their decoded values, in their order. `+` is a space, as browsers send it
/// from forms. A part without `=` has an empty value.
pub fn query_pairs(query: &str) -> impl Iterator<Item = (String, String)> {
    let parts = query.split('&').filter(|part| !part.is_empty());
    parts.map(|part| {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        let decode = |text: &str| decode_percent(&text.replace('+', " "));
        (decode(name), decode(value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_two_digits_behind_a_percent_sign_are_a_byte() {
        assert_eq!(decode_percent("%5Bfd00::1%5d"), "[fd00::1]");
        assert_eq!(decode_percent("%"), "%");
        assert_eq!(decode_percent("%4"), "%4");
        assert_eq!(decode_percent("%+1%zz"), "%+1%zz");
        assert_eq!(decode_percent("%C3%A9"), "é");
        assert_eq!(decode_percent("%ff"), "\u{fffd}");
    }

    #[test]
    fn what_is_encoded_is_read_again() {
        for value in ["", "shop.example", "/a b?c=d&e=f#g", "100 %", "+", "é\u{0}"] {
            let query = format!("first=1&value={}", encode_percent(value));
            let pairs: Vec<(String, String)> = query_pairs(&query).collect();
            assert_eq!(pairs[1], ("value".to_owned(), value.to_owned()), "{query}");
        }
        assert_eq!(encode_percent("a-b_c.d~e/"), "a-b_c.d~e%2F");
    }

    #[test]
    fn a_form_writes_spaces_as_plus() {
        let pairs: Vec<(String, String)> = query_pairs("a=b+c&&flag&d=%2B=").collect();
        let expected = [("a", "b c"), ("flag", ""), ("d", "+=")];
        assert_eq!(pairs, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
}
