//! Pure: the examples in every shipped ConfigMap, and the detection of edits of them.
//!
//! Rules: knative/pkg `configmap/example.go` and `webhook/configmaps/configmaps.go` at 521cb33.

use std::collections::BTreeMap;

use super::keys::EXAMPLE;

/// Annotation with the checksum of the examples as they were shipped.
pub const CHECKSUM_ANNOTATION: &str = "knative.dev/example-checksum";

/// Computes the checksum of the examples: CRC-32 as eight hexadecimal digits.
///
/// Spaces around the text do not count, and any number of line ends counts as one. Knative joins lines by a backslash
/// and an `n`, not by a line end; equal numbers need the same.
pub fn checksum(examples: &str) -> String {
    let mut joined = String::with_capacity(examples.len());
    let mut rest = examples.trim();
    while let Some(end) = rest.find(['\r', '\n']) {
        let (line, after) = rest.split_at(end);
        let next = skip_line_ends(after);
        joined.push_str(line);
        if next.len() == after.len() {
            // A carriage return alone ends no line, so it stays in the text.
            joined.push('\r');
            rest = after.get(1..).unwrap_or_default();
        } else {
            joined.push_str("\\n");
            rest = next;
        }
    }
    joined.push_str(rest);
    format!("{:08x}", crc32fast::hash(joined.as_bytes()))
}

fn skip_line_ends(mut text: &str) -> &str {
    while let Some(rest) = text.strip_prefix("\r\n").or_else(|| text.strip_prefix('\n')) {
        text = rest;
    }
    text
}

/// Refuses an edit of the examples, since it would not have the effect that the operator expects.
pub fn check(
    annotations: &BTreeMap<String, String>,
    data: &BTreeMap<String, String>,
) -> Result<(), String> {
    match (data.get(EXAMPLE), annotations.get(CHECKSUM_ANNOTATION)) {
        (Some(examples), Some(shipped)) if *shipped != checksum(examples) => Err(format!(
            "the update modifies a key in {EXAMPLE:?} which is probably not what you want. Instead, copy the \
             respective setting to the top-level of the ConfigMap, directly below \"data\""
        )),
        (Some(_), Some(_)) | (None, _) | (_, None) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected numbers: Go's `hash/crc32` over the joined lines.
    #[test]
    fn the_checksum_is_that_of_shipped_config_maps() {
        assert_eq!(checksum(""), "00000000");
        assert_eq!(checksum("1"), "83dcefb7");
        assert_eq!(checksum("  a\n\n\nb\r\n\n"), checksum("a\nb"));
        assert_eq!(checksum("a\nb"), format!("{:08x}", crc32fast::hash(b"a\\nb")));
        assert_ne!(checksum("a\rb"), checksum("a\nb"));
    }

    #[test]
    fn only_an_edit_of_the_examples_is_refused() {
        let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|&(key, text)| (key.into(), text.into())).collect()
        };
        let shipped = map(&[(CHECKSUM_ANNOTATION, &checksum("a: 1"))]);
        assert_eq!(check(&shipped, &map(&[(EXAMPLE, "a: 1\n"), ("a", "2")])), Ok(()));
        assert_eq!(check(&shipped, &map(&[])), Ok(()));
        assert_eq!(check(&map(&[]), &map(&[(EXAMPLE, "a: 2")])), Ok(()));
        let error = check(&shipped, &map(&[(EXAMPLE, "a: 2")])).unwrap_err();
        assert!(
            error.starts_with("the update modifies a key in \"_example\" which is probably not")
        );
    }
}
