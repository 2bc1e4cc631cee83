//! Scenarios of one test, which run at the same time on one node.
//!
//! Most of them wait for a window without requests. Together they take as long as the longest one, and the node starts
//! once.

use std::thread;

/// Name and function of a scenario on a node of this type.
pub type Scenario<N> = (&'static str, fn(&N));

/// Makes the list of scenarios from the paths of their functions.
#[macro_export]
macro_rules! scenarios {
    ($($scenario:path),+ $(,)?) => {
        [$((stringify!($scenario), $scenario as fn(&_))),+]
    };
}

/// Runs all scenarios at the same time, each on a thread with its name, to their ends. Panics with the names of those
/// that failed; their own messages come before.
pub fn run_at_once<N: Sync + 'static>(node: &N, scenarios: &[Scenario<N>]) {
    let failed: Vec<&str> = thread::scope(|scope| {
        let start = |&(name, scenario): &Scenario<N>| {
            let builder = thread::Builder::new().name(name.to_owned());
            let thread = builder.spawn_scoped(scope, move || scenario(node));
            (name, thread.expect("a thread"))
        };
        // All are started before the first one is joined.
        let running: Vec<_> = scenarios.iter().map(start).collect();
        let ended = running.into_iter().map(|(name, thread)| (name, thread.join()));
        ended.filter_map(|(name, result)| result.is_err().then_some(name)).collect()
    });
    assert!(failed.is_empty(), "failed scenarios: {failed:?}");
}

#[cfg(test)]
mod tests {
    use std::panic;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn scenarios_run_at_the_same_time() {
        fn meet(barrier: &Barrier) {
            barrier.wait();
        }
        fn meet_too(barrier: &Barrier) {
            barrier.wait();
        }
        // Neither one would end without the other.
        run_at_once(&Barrier::new(2), &scenarios![meet, meet_too]);
    }

    #[test]
    fn a_scenario_that_fails_is_named_and_ends_no_other_one() {
        fn fail(_: &AtomicBool) {
            panic!("on purpose");
        }
        fn pass(has_passed: &AtomicBool) {
            has_passed.store(true, Ordering::Relaxed);
        }
        let has_passed = AtomicBool::new(false);
        let run = || run_at_once(&has_passed, &scenarios![fail, pass]);
        let payload = panic::catch_unwind(run).expect_err("one has failed");
        let message = payload.downcast_ref::<String>().map(String::as_str);
        assert_eq!(message, Some("failed scenarios: [\"fail\"]"));
        assert!(has_passed.load(Ordering::Relaxed));
    }
}
