//! Pure: the tier of a crate's test, from the first line of its source file.

use super::TestTier;

/// Paths of the files whose first line may decide for the test `name`, most specific first.
///
/// The test `queue::tests::holds` is in `queue/tests.rs` or `queue.rs`, beside the crate's root. A test without a
/// module is in the root.
pub(super) fn candidate_files(root: &str, name: &str) -> Vec<String> {
    let folder = root.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut modules: Vec<&str> = name.split("::").collect();
    modules.pop();
    let mut files = Vec::new();
    while !modules.is_empty() {
        let path = modules.join("/");
        files.push(format!("{folder}/{path}.rs"));
        files.push(format!("{folder}/{path}/mod.rs"));
        modules.pop();
    }
    files.push(root.to_owned());
    files
}

/// Tier that a file's first line names. Test modules and crate roots name none.
pub(super) fn tier_of(first_line: &str) -> Option<TestTier> {
    match first_line {
        line if line.starts_with("//! Pure:") => Some(TestTier::Pure),
        line if line.starts_with("//! Shell:") => Some(TestTier::Shell),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_belongs_to_the_innermost_file_with_a_mark() {
        assert_eq!(
            candidate_files("/w/agent/src/lib.rs", "pods::tests::x"),
            [
                "/w/agent/src/pods/tests.rs",
                "/w/agent/src/pods/tests/mod.rs",
                "/w/agent/src/pods.rs",
                "/w/agent/src/pods/mod.rs",
                "/w/agent/src/lib.rs"
            ]
        );
        // The crate's own module of that name does not count.
        assert_eq!(
            candidate_files("/w/agent/tests/whole/main.rs", "pods::x"),
            [
                "/w/agent/tests/whole/pods.rs",
                "/w/agent/tests/whole/pods/mod.rs",
                "/w/agent/tests/whole/main.rs"
            ]
        );
        assert_eq!(tier_of("//! Pure: x"), Some(TestTier::Pure));
        assert_eq!(tier_of("//! Shell: x"), Some(TestTier::Shell));
        assert_eq!(tier_of("use super::*;"), None);
    }
}
