//! Pure: the path that a rule of the Gateway API puts in place of a request's.

use common::wire::PathModifier;

use crate::routes::path_match::{UnclearPath, path_end, skip_segments, strip_segments};

/// Returns path and query of a request with another path. `depth` is the number of segments of the prefix by which its
/// rule has matched the path, which begins with `/`.
///
/// Fails if the path cannot do without its prefix, as [`strip_segments`] does.
pub(crate) fn replace_path(
    target: &[u8],
    modifier: &PathModifier,
    depth: usize,
) -> Result<Vec<u8>, UnclearPath> {
    match modifier {
        PathModifier::FullPath(path) => Ok([path.as_bytes(), &target[path_end(target)..]].concat()),
        PathModifier::Prefix(prefix) if prefix.is_empty() => strip_segments(target, depth),
        PathModifier::Prefix(prefix) => {
            Ok([prefix.as_bytes(), skip_segments(target, depth)].concat())
        }
    }
}

#[cfg(test)]
mod tests {
    use common::wire::PathPrefix;

    use super::*;

    /// Asserts the paths after the replacement of a prefix. Each row has path, prefix, replacement and the expected path.
    fn assert_replaced(rows: &[(&str, &str, &str, &str)]) {
        for (path, prefix, replacement, expected) in rows {
            let replaced = with_prefix(path, prefix, replacement);
            assert_eq!(replaced, Ok((*expected).to_owned()), "{path} {prefix} {replacement}");
        }
    }

    /// Returns the path of a request after the replacement of a prefix.
    fn with_prefix(path: &str, prefix: &str, replacement: &str) -> Result<String, UnclearPath> {
        let depth = PathPrefix::parse(prefix).unwrap().depth();
        let modifier = PathModifier::parse_prefix(replacement).unwrap();
        let replaced = replace_path(path.as_bytes(), &modifier, depth)?;
        Ok(String::from_utf8(replaced).unwrap())
    }

    /// The table of `HTTPPathModifier` in the specification.
    #[test]
    fn a_prefix_is_replaced_as_the_specification_shows() {
        assert_replaced(&[
            ("/foo/bar", "/foo", "/xyz", "/xyz/bar"),
            ("/foo/bar", "/foo", "/xyz/", "/xyz/bar"),
            ("/foo/bar", "/foo/", "/xyz", "/xyz/bar"),
            ("/foo/bar", "/foo/", "/xyz/", "/xyz/bar"),
            ("/foo", "/foo", "/xyz", "/xyz"),
            ("/foo/", "/foo", "/xyz", "/xyz/"),
            ("/foo/bar", "/foo", "", "/bar"),
            ("/foo/", "/foo", "", "/"),
            ("/foo", "/foo", "", "/"),
            ("/foo/", "/foo", "/", "/"),
            ("/foo", "/foo", "/", "/"),
        ]);
    }

    #[test]
    fn the_query_and_what_follows_the_prefix_stay_as_they_are() {
        assert_replaced(&[
            ("/a?b=/c", "/a", "/x", "/x?b=/c"),
            ("/a/b%2Fc//d?e", "/a", "/x/y", "/x/y/b%2Fc//d?e"),
            ("/%61/b", "/a", "/x", "/x/b"),
            ("/a/b/c", "/a/b", "/x", "/x/c"),
            ("/a", "/", "/x", "/x/a"),
            ("/?a", "/", "/x", "/x/?a"),
            ("/a//b", "/a", "/x", "/x//b"),
        ]);
        assert_eq!(with_prefix("/a//b", "/a", "/"), Err(UnclearPath), "b would be a host");
    }

    #[test]
    fn a_whole_path_is_replaced_without_its_query() {
        let modifier = PathModifier::parse_full_path("/x/").unwrap();
        for (path, expected) in [("/a/b", "/x/"), ("/a?b=/c", "/x/?b=/c"), ("/", "/x/")] {
            let replaced = replace_path(path.as_bytes(), &modifier, 1);
            assert_eq!(replaced, Ok(expected.as_bytes().to_vec()), "{path}");
        }
    }
}
