//! Pure: names of child objects, shortened where they would be too long (knative/pkg `kmeta/names.go`).

use std::fmt::Write as _;

/// Longest label in Kubernetes, and so the longest of most names, in bytes.
const MAX_NAME_BYTES: usize = 63;
/// Length of an MD5 sum in hexadecimal digits.
const MD5_HEX_BYTES: usize = 32;
/// Bytes of a name that fit before the sum.
const MAX_PREFIX_BYTES: usize = MAX_NAME_BYTES - MD5_HEX_BYTES;

/// Joins `parent` and `suffix` where that is at most 63 bytes. Otherwise `parent` is cut, and the MD5 sum of the whole
/// `parent` follows, so that different parents have different names.
pub fn child_name(parent: &str, suffix: &str) -> String {
    if parent.len() + suffix.len() <= MAX_NAME_BYTES {
        return trim_name_end(format!("{parent}{suffix}"));
    }
    // Most suffixes are short: then the suffix stays readable and only the parent is cut.
    if suffix.len() < MAX_PREFIX_BYTES {
        let prefix = truncate(parent, MAX_PREFIX_BYTES - suffix.len());
        return trim_name_end(format!("{prefix}{}{suffix}", md5_hex(parent)));
    }
    // A longer suffix is cut too, so the sum covers both.
    let mut name =
        format!("{}{}", truncate(parent, MAX_PREFIX_BYTES), md5_hex(&format!("{parent}{suffix}")));
    let free_bytes = MAX_NAME_BYTES.saturating_sub(name.len());
    name.push_str(truncate(suffix, free_bytes));
    trim_name_end(name)
}

/// Value of a label that states a name or a domain, which may be longer than the value of a label: then it is cut as a
/// name is.
pub fn label_value(text: &str) -> String {
    child_name(text, "")
}

/// Name of a Route's tag, `<tag>-<route>`; without a tag the Route's own.
pub fn tagged_name(tag: Option<&str>, route: &str) -> String {
    tag.map_or_else(|| route.to_owned(), |tag| child_name(&format!("{tag}-"), route))
}

/// Longest prefix of `text` with at most `length` bytes that ends at a character boundary.
fn truncate(text: &str, length: usize) -> &str {
    let end = (0..=length.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

fn md5_hex(text: &str) -> String {
    md5::compute(text).iter().fold(String::with_capacity(MD5_HEX_BYTES), |mut out, byte| {
        // Writing to a `String` never fails.
        let _ = write!(out, "{byte:02x}");
        out
    })
}

/// Removes a trailing `-` or `.`, which a cut may leave and no name may have.
fn trim_name_end(mut name: String) -> String {
    name.truncate(name.trim_end_matches(|it: char| !it.is_ascii_alphanumeric()).len());
    name
}

/// Name of a Revision's Deployment.
pub fn deployment_name(revision: &str) -> String {
    child_name(revision, "-deployment")
}

/// Name of the Image object of a Revision's container.
pub fn image_name(revision: &str, container: &str) -> String {
    child_name(revision, &format!("-cache-{container}"))
}

/// Name of the Service that selects a Revision's pods.
pub fn private_service_name(revision: &str) -> String {
    child_name(revision, "-private")
}

/// Suffix of the name of a slice of IPv6 addresses. No Service's name has a dot, so the name cannot collide.
pub const V6_SUFFIX: &str = ".v6";

/// Name of a slice of a Service; `suffix` is [`V6_SUFFIX`] or empty.
pub fn slice_name(service: &str, suffix: &str) -> String {
    child_name(service, suffix)
}

/// Suffixes of the names of a scaled Service's slices, for IPv4 and IPv6.
pub const SCALED_SLICE_SUFFIXES: [&str; 2] = ["-rouse", "-rouse-v6"];

/// Names of the slices of a scaled Service. They are never cut: a slice's name may have 253 characters.
pub fn scaled_slice_names(service: &str) -> [String; 2] {
    SCALED_SLICE_SUFFIXES.map(|suffix| format!("{service}{suffix}"))
}

/// Name of the scaled Service whose slice would have this name.
pub fn scaled_service_of_slice(slice: &str) -> Option<&str> {
    SCALED_SLICE_SUFFIXES.into_iter().find_map(|suffix| slice.strip_suffix(suffix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn short_names_are_joined_and_long_ones_keep_their_suffix() {
        assert_eq!(child_name("hello-00001", "-deployment"), "hello-00001-deployment");
        let long = "a".repeat(63);
        let name = child_name(&long, "-deployment");
        assert_eq!(name.len(), 63);
        // The sum is the output of `printf a×63 | md5sum`.
        assert_eq!(name, format!("{}b06521f39153d618550606be297466d5-deployment", "a".repeat(20)));
        let names = child_name("short", &"b".repeat(80));
        assert!(names.starts_with("short") && names.len() == 63, "{names}");
    }

    #[test]
    fn a_cut_name_does_not_end_in_a_dash() {
        assert_eq!(child_name("svc-", ""), "svc");
    }

    proptest! {
        #[test]
        fn every_name_fits_and_differs_with_its_parent(
            one in "[a-z][a-z0-9]{0,100}", two in "[a-z][a-z0-9]{0,100}", suffix in "-[a-z]{1,40}",
        ) {
            let (a, b) = (child_name(&one, &suffix), child_name(&two, &suffix));
            prop_assert!(a.len() <= 63 && b.len() <= 63);
            prop_assert_eq!(one == two, a == b);
        }
    }
}
