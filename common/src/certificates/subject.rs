//! Pure: subject of a certificate as text, in the form of RFC 4514.

use x509_parser::{
    parse_x509_certificate,
    x509::{AttributeTypeAndValue, RelativeDistinguishedName},
};

/// Short names of attributes, by their object identifiers: those that OpenSSL writes.
const ATTRIBUTE_NAMES: [(&str, &str); 12] = [
    ("2.5.4.3", "CN"),
    ("2.5.4.5", "serialNumber"),
    ("2.5.4.6", "C"),
    ("2.5.4.7", "L"),
    ("2.5.4.8", "ST"),
    ("2.5.4.9", "street"),
    ("2.5.4.10", "O"),
    ("2.5.4.11", "OU"),
    ("2.5.4.12", "title"),
    ("0.9.2342.19200300.100.1.1", "UID"),
    ("0.9.2342.19200300.100.1.25", "DC"),
    ("1.2.840.113549.1.9.1", "emailAddress"),
];

/// Returns the subject of a certificate in DER; `None`: the certificate is malformed.
///
/// The last part comes first, as in `CN=a,O=b`. The text is printable ASCII without quotation marks: a quotation mark
/// or backslash in a value is written as `\` with two hex digits, as is each other byte. So the text can stand between
/// quotation marks, and no value can look like several.
pub fn format_subject(certificate: &[u8]) -> Option<String> {
    let Ok(([], certificate)) = parse_x509_certificate(certificate) else { return None };
    let mut parts: Vec<String> = certificate.subject().iter_rdn().map(format_part).collect();
    parts.reverse();
    Some(parts.join(","))
}

fn format_part(part: &RelativeDistinguishedName<'_>) -> String {
    part.iter().map(format_attribute).collect::<Vec<_>>().join("+")
}

fn format_attribute(attribute: &AttributeTypeAndValue<'_>) -> String {
    let oid = attribute.attr_type().to_id_string();
    let name = ATTRIBUTE_NAMES.iter().find(|(known, _)| *known == oid).map(|(_, name)| *name);
    match (name, attribute.as_str()) {
        (Some(name), Ok(value)) => format!("{name}={}", escape(value)),
        // A value that is no text of ASCII or UTF-8, or an attribute without a short name: its content in hex.
        (name, _) => {
            let hex: String = attribute.as_slice().iter().map(|it| format!("{it:02x}")).collect();
            format!("{}=#{hex}", name.unwrap_or(&oid))
        }
    }
}

fn escape(value: &str) -> String {
    let last = value.len().saturating_sub(1);
    let mut out = String::with_capacity(value.len());
    for (at, byte) in value.bytes().enumerate() {
        // RFC 4514: a space is escaped only at the begin and at the end.
        let is_at_end = at == 0 || at == last;
        match byte {
            b'"' | b'\\' => out.push_str(&format!("\\{byte:02X}")),
            b',' | b'+' | b';' | b'<' | b'>' => out.extend(['\\', char::from(byte)]),
            b'#' if at == 0 => out.push_str("\\#"),
            b' ' if is_at_end => out.push_str("\\ "),
            b' '..=b'~' => out.push(char::from(byte)),
            _ => out.push_str(&format!("\\{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::certificates::TestAuthority;

    #[test]
    fn the_last_part_of_a_subject_comes_first() {
        let client = TestAuthority::new().issue_client("alice");
        let subject = format_subject(&client.material().chain[0]);
        assert_eq!(subject.as_deref(), Some("CN=alice,O=Clients"));
        assert_eq!(format_subject(b"no certificate"), None);
    }

    #[test]
    fn no_value_ends_a_quotation_or_looks_like_several() {
        for (value, expected) in [
            ("a,O=admins", "a\\,O=admins"),
            ("a\";Subject=\"CN=b", "a\\22\\;Subject=\\22CN=b"),
            ("a\\", "a\\5C"),
            ("#a", "\\#a"),
            (" a b ", "\\ a b\\ "),
            ("\u{e4}\r\n", "\\C3\\A4\\0D\\0A"),
            ("a+b<c>d", "a\\+b\\<c\\>d"),
            ("", ""),
        ] {
            assert_eq!(escape(value), expected);
        }
        let client = TestAuthority::new().issue_client("a,O=admins");
        let subject = format_subject(&client.material().chain[0]);
        assert_eq!(subject.as_deref(), Some("CN=a\\,O=admins,O=Clients"));
    }
}
