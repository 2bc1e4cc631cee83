//! Pure: names of children, cut where they would be too long (knative/pkg `kmeta/names.go`).

use std::fmt::Write as _;

/// Kubernetes' bound of a label, and so of most names.
const LONGEST: usize = 63;
/// Characters of an MD5 sum in hexadecimal.
const SUM: usize = 32;
/// What is left of a name before the sum.
const HEAD: usize = LONGEST - SUM;

/// `parent` followed by `suffix`, where that is at most 63 bytes; otherwise cut, with the MD5 sum of what was cut
/// in place of the rest, so that different parents keep different names.
pub fn child_name(parent: &str, suffix: &str) -> String {
    if parent.len() + suffix.len() <= LONGEST {
        return valid(format!("{parent}{suffix}"));
    }
    if suffix.len() < HEAD {
        let kept = cut(parent, HEAD - suffix.len());
        return valid(format!("{kept}{}{suffix}", sum(parent)));
    }
    let mut name = format!("{}{}", cut(parent, HEAD), sum(&format!("{parent}{suffix}")));
    let room = LONGEST.saturating_sub(name.len());
    name.push_str(cut(suffix, room));
    valid(name)
}

/// The name of a route's tag, or the route's own.
pub fn tagged(tag: Option<&str>, route: &str) -> String {
    tag.map_or_else(|| route.to_owned(), |tag| child_name(&format!("{tag}-"), route))
}

/// At most `length` bytes of `text`, at a character's border.
fn cut(text: &str, length: usize) -> &str {
    let end = (0..=length.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

fn sum(text: &str) -> String {
    md5::compute(text).iter().fold(String::with_capacity(SUM), |mut out, byte| {
        // A string takes everything that is written to it.
        let _ = write!(out, "{byte:02x}");
        out
    })
}

/// A cut may end in `-` or `.`, which no name may.
fn valid(mut name: String) -> String {
    name.truncate(name.trim_end_matches(|it: char| !it.is_ascii_alphanumeric()).len());
    name
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
        // The sum is `printf a×63 | md5sum`.
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
