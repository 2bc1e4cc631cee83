//! Pure: names of child objects, shortened where they would be too long (knative/pkg `kmeta/names.go`).

use std::fmt::Write as _;

/// Longest label in Kubernetes, and so the longest of most names, in bytes.
const MAX_LABEL_BYTES: usize = 63;
/// Longest name of an object whose name may have several labels, in bytes.
const MAX_SUBDOMAIN_BYTES: usize = 253;
/// Length of an MD5 sum in hexadecimal digits.
const MD5_HEX_BYTES: usize = 32;

/// Joins `parent` and `suffix` where that is at most 63 bytes. Otherwise `parent` is cut, and the MD5 sum of the whole
/// `parent` follows, so that different parents have different names.
pub fn child_name(parent: &str, suffix: &str) -> String {
    bounded_name(parent, suffix, MAX_LABEL_BYTES)
}

/// Name of an Event on an object, with the time of the Event in nanoseconds.
pub fn event_name(object: &str, time_ns: i128) -> String {
    bounded_name(object, &format!(".{time_ns:x}"), MAX_SUBDOMAIN_BYTES)
}

/// Joins `parent` and `suffix`, and cuts the result as [`child_name`] does where it has more than `max_bytes`.
fn bounded_name(parent: &str, suffix: &str, max_bytes: usize) -> String {
    if parent.len() + suffix.len() <= max_bytes {
        return trim_name_end(format!("{parent}{suffix}"));
    }
    // Bytes of the name that fit before the sum.
    let max_prefix_bytes = max_bytes - MD5_HEX_BYTES;
    // Most suffixes are short: then the suffix stays readable and only the parent is cut.
    if suffix.len() < max_prefix_bytes {
        let prefix = truncate(parent, max_prefix_bytes - suffix.len());
        return trim_name_end(format!("{prefix}{}{suffix}", md5_hex(parent)));
    }
    // A longer suffix is cut too, so the sum covers both.
    let mut name =
        format!("{}{}", truncate(parent, max_prefix_bytes), md5_hex(&format!("{parent}{suffix}")));
    let free_bytes = max_bytes.saturating_sub(name.len());
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

/// Names of the slices of a scaled Service. They are never cut: a Service's name has up to 63 bytes, and a slice's up to
/// 253.
pub fn scaled_slice_names(service: &str) -> [String; 2] {
    SCALED_SLICE_SUFFIXES.map(|suffix| bounded_name(service, suffix, MAX_SUBDOMAIN_BYTES))
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

    /// Names of each kind that are derived from a name, and the longest that the API server takes.
    fn derived_names(parent: &str) -> Vec<(String, usize)> {
        let labels = [
            child_name(parent, "-00001"),
            label_value(parent),
            tagged_name(Some("blue"), parent),
            tagged_name(Some(parent), "hello"),
            deployment_name(parent),
            image_name(parent, "main"),
            image_name("hello-00001", parent),
            private_service_name(parent),
            slice_name(parent, V6_SUFFIX),
        ];
        let labels = labels.into_iter().map(|it| (it, MAX_LABEL_BYTES));
        let event = (event_name(parent, 0x18d0_0000_0000_0000), MAX_SUBDOMAIN_BYTES);
        let slices = scaled_slice_names(parent).map(|it| (it, MAX_SUBDOMAIN_BYTES));
        labels.chain([event]).chain(slices).collect()
    }

    /// Returns true if an object may have the name (RFC 1123, as the API server checks it).
    fn is_subdomain(name: &str) -> bool {
        name.split('.').all(|label| {
            let is_edge = |it: Option<u8>| it.is_some_and(|it| it.is_ascii_alphanumeric());
            let has_edges = is_edge(label.bytes().next()) && is_edge(label.bytes().next_back());
            let is_inner = |it: u8| it.is_ascii_digit() || it.is_ascii_lowercase() || it == b'-';
            has_edges && label.bytes().all(is_inner)
        })
    }

    #[test]
    fn each_derived_name_is_valid_and_differs_with_its_parent_at_each_length() {
        for length in 1..=253 {
            let parent = |last: char| {
                let head: String = "ab.c-d".chars().cycle().take(length - 1).collect();
                format!("{head}{last}")
            };
            let pairs = derived_names(&parent('x')).into_iter().zip(derived_names(&parent('y')));
            for ((name, max_bytes), (other, _)) in pairs {
                assert!(name.len() <= max_bytes, "{length}: {name}");
                assert!(is_subdomain(&name), "{length}: {name}");
                assert_ne!(name, other, "{length}");
            }
        }
    }

    #[test]
    fn a_cut_name_of_an_event_keeps_its_time() {
        let [fits, long] = [236, 237].map(|length| "n".repeat(length));
        assert_eq!(event_name(&fits, 0x18d0_0000_0000_0001), format!("{fits}.18d0000000000001"));
        let cut = event_name(&long, 0x18d0_0000_0000_0001);
        assert_eq!(cut, format!("{}{}.18d0000000000001", "n".repeat(204), md5_hex(&long)));
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
