//! Pure: supported kernels, their Debian suites, and the tests that a kernel cannot pass.

/// Major and minor number of a kernel.
pub(crate) type KernelSeries = (u32, u32);

/// A kernel on which all programs must load and all tests must pass.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SupportedKernel {
    /// Name on the command line.
    pub(crate) name: &'static str,
    /// Debian suites with this kernel. The highest version among them counts.
    pub(crate) suites: &'static [&'static str],
    /// Suite of its security fixes, on the security mirror.
    pub(crate) security: Option<&'static str>,
}

/// All supported kernels, the oldest first.
pub(crate) const KERNELS: [SupportedKernel; 4] = [
    SupportedKernel { name: "5.10", suites: &["bullseye"], security: Some("bullseye-security") },
    SupportedKernel { name: "6.1", suites: &["bookworm"], security: Some("bookworm-security") },
    SupportedKernel { name: "6.12", suites: &["trixie"], security: Some("trixie-security") },
    SupportedKernel { name: "newest", suites: &["trixie-backports", "unstable"], security: None },
];

/// Finds a kernel by its name.
pub(crate) fn find_kernel(name: &str) -> Result<&'static SupportedKernel, String> {
    let names = || KERNELS.map(|kernel| kernel.name).join(", ");
    KERNELS.iter().find(|kernel| kernel.name == name).ok_or_else(|| format!("one of {}", names()))
}

/// Tests that need at least a certain kernel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UnsupportedTests {
    /// First kernel with the feature that the tests need.
    since: KernelSeries,
    /// Missing feature of older kernels.
    pub(crate) reason: &'static str,
    tests: &'static [&'static str],
}

/// Table of all such tests. A listed test that no longer exists is an error, so that no old name hides a gap.
const UNSUPPORTED_TESTS: [UnsupportedTests; 2] = [
    UnsupportedTests {
        since: (5, 15),
        reason: "no cookies in sock_ops (5.15): listeners from before the programs are not counted",
        tests: &[
            "pod_ports::an_upgrade_to_another_abi_hands_all_ports_of_a_pod_over",
            "request_counts::upgrade::an_upgrade_to_another_abi_loses_no_connection_and_no_count",
        ],
    },
    UnsupportedTests {
        since: (6, 5),
        reason: "no bpf_sock_destroy (6.5): connections are closed without their locks",
        tests: &[
            "locked_close::a_connection_is_closed_only_where_it_stands_at_its_position",
            "locked_close::a_walk_stays_in_the_namespace_it_began_in",
            "locked_close::connections_of_both_families_are_closed_and_others_left_alone",
            "locked_close::more_connections_than_one_walk_takes_are_closed_by_further_walks",
            "locked_close::no_request_that_was_written_is_lost_by_a_close",
            "locked_close::only_a_connection_that_is_as_it_was_listed_is_closed",
        ],
    },
];

/// Tests of the kernel tier, divided by what a kernel supports.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TestSelection {
    /// Names of the tests to run.
    pub(crate) supported: Vec<String>,
    /// Names of the tests that are skipped, with the reason.
    pub(crate) unsupported: Vec<(String, &'static str)>,
}

/// Fails if the table names a test that is not in `tests`, the list of all tests.
pub(crate) fn check_table(tests: &[String]) -> Result<(), String> {
    let listed = UNSUPPORTED_TESTS.iter().flat_map(|entry| entry.tests);
    let missing: Vec<_> = listed.filter(|name| !tests.iter().any(|test| test == *name)).collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "the table of unsupported tests names tests that no longer exist: {missing:?}"
        )),
    }
}

/// Divides tests by what a kernel of this series supports.
pub(crate) fn select_tests(tests: &[String], kernel: KernelSeries) -> TestSelection {
    let mut choice = TestSelection::default();
    for test in tests {
        match unsupported_reason(test, kernel) {
            Some(reason) => choice.unsupported.push((test.clone(), reason)),
            None => choice.supported.push(test.clone()),
        }
    }
    choice
}

fn unsupported_reason(test: &str, kernel: KernelSeries) -> Option<&'static str> {
    let entry = UNSUPPORTED_TESTS.iter().find(|entry| entry.tests.contains(&test))?;
    (kernel < entry.since).then_some(entry.reason)
}

/// Parses the series of a release: `6.1.0-50-amd64` → 6.1.
pub(crate) fn parse_series(release: &str) -> Option<KernelSeries> {
    let mut numbers = release.split(['.', '-']).map(|text| text.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tests() -> Vec<String> {
        let listed = UNSUPPORTED_TESTS.iter().flat_map(|entry| entry.tests);
        listed.map(|&test| test.to_owned()).chain(["listening_sockets::x".to_owned()]).collect()
    }

    #[test]
    fn only_older_kernels_skip_a_test_and_each_skip_has_a_reason() {
        let oldest = select_tests(&tests(), (5, 10));
        assert_eq!(oldest.supported, ["listening_sockets::x"]);
        let (first, last) = (oldest.unsupported.first(), oldest.unsupported.last());
        assert!(first.is_some_and(|(_, reason)| reason.contains("5.15")), "{first:?}");
        assert!(last.is_some_and(|(_, reason)| reason.contains("6.5")), "{last:?}");
        let skipped_on_6_1 = select_tests(&tests(), (6, 1)).unsupported;
        assert!(skipped_on_6_1.len() > 1 && skipped_on_6_1.len() < oldest.unsupported.len());
        let is_of_6_5 = |(name, _): &(String, &str)| name.starts_with("locked_close::");
        assert!(skipped_on_6_1.iter().all(is_of_6_5), "{skipped_on_6_1:?}");
        assert_eq!(select_tests(&tests(), (6, 5)).unsupported, []);
    }

    /// Such a test passes on an older kernel, where it would count as supported.
    #[test]
    fn each_test_that_returns_without_a_locked_closer_is_in_the_table() {
        let source = include_str!("../../../tests/kernel/locked_close.rs");
        let returning = source
            .split("#[test]\nfn ")
            .skip(1)
            .filter(|text| text.contains("closer_fixture() else { return }"));
        let mut names: Vec<String> = returning
            .filter_map(|text| text.split_once('('))
            .map(|(name, _)| format!("locked_close::{name}"))
            .collect();
        names.sort();
        let listed = UNSUPPORTED_TESTS.iter().flat_map(|entry| entry.tests);
        let listed = listed.copied().filter(|name| name.starts_with("locked_close::"));
        assert_eq!(names, listed.collect::<Vec<_>>());
    }

    #[test]
    fn a_table_that_names_a_test_that_is_gone_is_refused() {
        assert_eq!(check_table(&tests()), Ok(()));
        assert!(
            check_table(&["listening_sockets::x".to_owned()])
                .unwrap_err()
                .contains("locked_close::")
        );
    }

    #[test]
    fn a_release_tells_its_series() {
        assert_eq!(parse_series("6.1.0-50-amd64"), Some((6, 1)));
        assert_eq!(parse_series("7.3.4+deb13-amd64"), Some((7, 3)));
        assert_eq!(parse_series("odd"), None);
    }
}
