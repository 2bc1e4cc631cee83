use proptest::prelude::*;

use super::*;

fn rules(prefixes: &[&str]) -> BTreeMap<SmolStr, String> {
    prefixes.iter().map(|it| (SmolStr::from(*it), (*it).to_owned())).collect()
}

fn choose(prefixes: &[&str], path: &str) -> Result<Option<String>, UnclearPath> {
    longest_prefix(&rules(prefixes), path).map(|it| it.cloned())
}

#[test]
fn the_longest_prefix_of_whole_segments_wins() {
    let all = ["", "/a", "/a/b", "/a-b", "/c"];
    for (path, prefix) in [
        ("/", ""),
        ("", ""),
        ("*", ""),
        ("/a", "/a"),
        ("/a/", "/a"),
        ("/a/x", "/a"),
        ("/ab", ""),
        ("/a-b/x", "/a-b"),
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b"),
        ("/a/bc", "/a"),
        ("/A", ""),
        ("/%61/%62", "/a/b"),
        ("/a%2Db", "/a-b"),
        ("/a%20b", ""),
        ("/c/%zz/%", "/c"),
    ] {
        assert_eq!(choose(&all, path), Ok(Some(prefix.to_owned())), "{path}");
    }
    for path in ["/", "*", "/ab", "/b/a", ""] {
        assert_eq!(choose(&["/a"], path), Ok(None), "{path}");
    }
}

#[test]
fn a_path_with_several_readings_is_refused_if_they_differ_in_the_choice() {
    let all = ["", "/a", "/a/b"];
    for path in [
        "//a", "/./a", "/%2e/a", "/x%2Fa", "/a%2fb", "/a%5Cb", "/a\\b", "/a//b", "/a/./b", "/a%00",
        "/a%23", "/a%3Fb", "/%2561", "/a;v=1", "/a;v=1/b", "/a%3Bv", "/;/a",
    ] {
        assert_eq!(choose(&all, path), Err(UnclearPath), "{path}");
    }
    // No prefix is longer than the segments before.
    for path in ["/a/b//c", "/a/b/x%2Fy", "/a/b/./", "/a/b/x\\y", "/a/b/%2561", "/a/b/c;v=1"] {
        assert_eq!(choose(&all, path), Ok(Some("/a/b".to_owned())), "{path}");
    }
    assert_eq!(choose(&all, "/shop;session=1"), Ok(Some(String::new())));
}

#[test]
fn a_path_that_may_leave_its_prefix_is_refused() {
    for path in [
        "/a/..",
        "/a/../b",
        "/a/%2e%2E/b",
        "/a/.%2e",
        "/a/x%2F..%2Fb",
        "/a/..%5cb",
        "/a/..\\b",
        "/a/..;/b",
        "/a/..%3B/b",
        "/a/..%00/b",
        "/a/%252e%252e/b",
        "/a/%25252e",
    ] {
        assert_eq!(choose(&["/a"], path), Err(UnclearPath), "{path}");
    }
    assert_eq!(choose(&["/a"], "/a/.../..x"), Ok(Some("/a".to_owned())));
}

#[test]
fn a_prefix_is_stripped_with_its_segments_alone() {
    let strip = |target: &str, depth| {
        strip_segments(target.as_bytes(), depth).map(|it| String::from_utf8(it).unwrap())
    };
    for (target, depth, rest) in [
        ("/a", 1, "/"),
        ("/a/", 1, "/"),
        ("/a?x=/y", 1, "/?x=/y"),
        ("/a/b/c%2Fd?e", 1, "/b/c%2Fd?e"),
        ("/a/b/c", 2, "/c"),
        ("/%61/b", 1, "/b"),
        ("/a/b", 0, "/a/b"),
    ] {
        assert_eq!(strip(target, depth), Ok(rest.to_owned()), "{target}");
    }
    for host in ["/a//evil.example/", "/a/\\evil.example/", "/a//", "/a/\\"] {
        assert_eq!(strip(host, 1), Err(UnclearPath), "{host}");
    }
    assert_eq!(strip("/a/b\\c", 1), Ok("/b\\c".to_owned()), "no host can begin there");
}

/// Ways in which servers read a path: the segments that each way sees.
fn server_readings(path: &str) -> Vec<Vec<String>> {
    let decoded = String::from_utf8_lossy(&decode(path.as_bytes(), |_| true)).into_owned();
    let mut readings = Vec::new();
    for text in [path.to_owned(), decoded] {
        for options in 0..16_u8 {
            let has = |bit: u8| options & (1 << bit) != 0;
            let text = if has(0) { text.replace('\\', "/") } else { text.clone() };
            let mut seen: Vec<String> = Vec::new();
            for segment in text.split('/').skip(1) {
                let segment = if has(1) { segment.split(';').next().unwrap() } else { segment };
                match segment {
                    "" if has(2) => {}
                    "." if has(3) => {}
                    ".." if has(3) => drop(seen.pop()),
                    _ => {
                        let decoded = decode(segment.as_bytes(), |_| true);
                        seen.push(String::from_utf8_lossy(&decoded).into_owned());
                    }
                }
            }
            readings.push(seen);
        }
    }
    readings
}

/// Longest prefix of these segments, by comparison with each prefix.
fn reference(prefixes: &[&'static str], seen: &[String]) -> Option<&'static str> {
    let fits = |prefix: &&&str| {
        let wanted: Vec<&str> = prefix.split('/').skip(1).collect();
        seen.len() >= wanted.len() && wanted.iter().zip(seen).all(|(one, other)| one == other)
    };
    prefixes.iter().filter(fits).max_by_key(|it| it.len()).copied()
}

const PREFIXES: [&str; 6] = ["", "/a", "/a/b", "/b", "/b/a/b", "/a.b"];

proptest! {
    #[test]
    fn every_server_sees_the_chosen_prefix(
        parts in proptest::collection::vec(
            prop::sample::select(vec![
                "/", "a", "b", ".", "..", ";", "%2F", "%5c", "\\", "%61", "%2e", "%3B", "ab", "%",
            ]),
            0..10,
        ),
        chosen in prop::sample::subsequence(PREFIXES.to_vec(), 1..=6),
    ) {
        let path = format!("/{}", parts.concat());
        if let Ok(prefix) = choose(&chosen, &path) {
            for seen in server_readings(&path) {
                let expected = reference(&chosen, &seen).map(ToOwned::to_owned);
                prop_assert_eq!(&prefix, &expected, "{} read as {:?}", path, seen);
            }
        }
    }

    #[test]
    fn plain_paths_are_never_refused(
        segments in proptest::collection::vec("[ab.]?[abc-]{1,2}", 0..5),
        chosen in prop::sample::subsequence(PREFIXES.to_vec(), 1..=6),
    ) {
        let path = format!("/{}", segments.join("/"));
        let expected = reference(&chosen, &segments).map(ToOwned::to_owned);
        prop_assert_eq!(choose(&chosen, &path), Ok(expected));
    }
}
