//! Pure: rules of traffic targets (knative/serving `pkg/apis/serving/v1/route_validation.go` at 98e5ef9).

use std::collections::BTreeMap;

use super::dns_names;
use crate::model::{knative::TrafficTarget, problem::Problem};

const AT: &str = "spec.traffic";

/// Checks all targets. Targets of a Service never name a Configuration, since it has one of its own.
pub(super) fn check_targets(
    targets: &[TrafficTarget],
    is_service: bool,
    problems: &mut Vec<Problem>,
) {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, target) in targets.iter().enumerate() {
        let at = format!("{AT}[{index}]");
        check_target(target, is_service, &at, problems);
        if let Some(tag) = target.tag.as_deref().filter(|tag| !tag.is_empty()) {
            check_tag(tag, &at, problems);
            if let Some(first) = seen.get(tag) {
                let message = format!("Multiple definitions for {tag:?}");
                problems.push(Problem::new(format!("{AT}[{first}].tag, {at}.tag"), message));
            } else {
                seen.insert(tag, index);
            }
        }
    }
    let percents = targets.iter().filter_map(|target| target.percent);
    // Percents are not bounded yet here, so their sum must not overflow.
    let sum = percents.fold(0_i64, i64::saturating_add);
    if sum != 100 {
        problems.push(Problem::new(AT, format!("Traffic targets sum to {sum}, want 100")));
    }
}

fn check_target(target: &TrafficTarget, is_service: bool, at: &str, problems: &mut Vec<Problem>) {
    check_latest(target, at, problems);
    check_names(target, is_service, at, problems);
    if let Some(percent) = target.percent.filter(|percent| !(0..=100).contains(percent)) {
        problems.push(Problem::out_of_bounds(format!("{at}.percent"), 0, percent, 100));
    }
    if target.url.as_deref().is_some_and(|url| !url.is_empty()) {
        problems.push(Problem::disallowed(format!("{at}.url")));
    }
}

/// Checks that a target either follows the latest Revision or names one.
fn check_latest(target: &TrafficTarget, at: &str, problems: &mut Vec<Problem>) {
    let revision = target.revision_name.as_deref().unwrap_or_default();
    if let Some(latest) = target.latest_revision
        && latest != revision.is_empty()
    {
        let message =
            format!("may not set revisionName {revision:?} when latestRevision is {latest}");
        problems.push(Problem::new(format!("{at}.latestRevision"), message));
    }
}

/// Checks that a target names a Revision or a Configuration, as its owner needs.
fn check_names(target: &TrafficTarget, is_service: bool, at: &str, problems: &mut Vec<Problem>) {
    let text = |name: &Option<String>| name.clone().unwrap_or_default();
    let revision = text(&target.revision_name);
    let configuration = text(&target.configuration_name);
    let mut qualified = |field: &str, name: &str| {
        let errors = dns_names::qualified_name_errors(name);
        if !errors.is_empty() {
            let problem = Problem::invalid_key(format!("{at}.{field}"), name);
            problems.push(problem.with_details(errors.join(", ")));
        }
    };
    match (revision.is_empty(), configuration.is_empty()) {
        (_, false) if is_service => {
            problems.push(Problem::disallowed(format!("{at}.configurationName")));
        }
        (false, false) => {
            problems
                .push(Problem::several_set(format!("{at}.revisionName, {at}.configurationName")));
        }
        (false, true) => qualified("revisionName", &revision),
        (true, false) => qualified("configurationName", &configuration),
        // Without a name a Service's target follows its own Configuration.
        (true, true) if is_service => {}
        (true, true) => {
            problems.push(Problem::none_set(format!("{at}.configurationName, {at}.revisionName")));
        }
    }
}

fn check_tag(tag: &str, at: &str, problems: &mut Vec<Problem>) {
    let errors = dns_names::dns1035_errors(tag);
    if !errors.is_empty() {
        let value = format!("not a DNS 1035 label: {}", dns_names::go_list(&errors));
        problems.push(Problem::invalid(format!("{at}.tag"), value));
    }
}
