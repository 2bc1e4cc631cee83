//! Pure: the choice for a request → text for reading.

use std::collections::BTreeSet;

use activator::route_facts::{
    RequestOutcome, RequestTraceFacts, RevisionFacts, RoutedPodFacts, RoutedPodRank,
    TracedTargetFacts,
};

use crate::table::TextTable;

/// Returns the text of a trace, with all pods if it is wide.
pub(super) fn text(facts: &RequestTraceFacts, is_wide: bool) -> String {
    let transport = if facts.is_tls { ", TLS" } else { "" };
    let mut text = format!(
        "Request for {}{} at {} (entrypoint {}{transport})\n",
        facts.host, facts.path, facts.activator, facts.entrypoint,
    );
    for (title, line) in lines(facts) {
        text += &format!("  {:13}{line}\n", format!("{title}:"));
    }
    if !facts.targets.is_empty() {
        text += &format!("\n{}", targets_table(&facts.targets).to_text());
    }
    if is_wide {
        for target in &facts.targets {
            text += &pods_text(&target.revision);
        }
    }
    text
}

fn lines(facts: &RequestTraceFacts) -> Vec<(&'static str, String)> {
    let mut lines = vec![("Result", outcome_text(facts)), ("Reason", facts.reason.clone())];
    if facts.activator.routes_version == 0 {
        let unknown = "the activator has received no routes from the controller yet";
        lines.push(("Unknown", unknown.to_owned()));
    }
    // The rule that has found the service is the reason already.
    let tried = facts.rules.iter().filter(|it| !it.is_match);
    lines.extend(tried.map(|it| ("Tried", format!("{}: no service", it.rule))));
    lines.extend(facts.tag.iter().map(|it| ("Tag", it.clone())));
    let certificate = facts.certificate.as_ref();
    lines
        .extend(certificate.map(|it| ("Certificate", format!("{} ({})", it.name, it.rule.name()))));
    lines.extend(facts.notes.iter().map(|it| ("Note", it.clone())));
    lines
}

fn outcome_text(facts: &RequestTraceFacts) -> String {
    let service = facts.service.as_deref().unwrap_or("a service");
    let status = facts.status.map(|it| format!(" with status {it}")).unwrap_or_default();
    match facts.outcome {
        RequestOutcome::Revision => format!("goes to a Revision of {service}"),
        RequestOutcome::Redirect => {
            format!("is redirected{status} to {}", facts.location.as_deref().unwrap_or("https"))
        }
        RequestOutcome::Probe => "is answered by the activator".to_owned(),
        RequestOutcome::Refused => format!("is refused{status}"),
    }
}

fn targets_table(targets: &[TracedTargetFacts]) -> TextTable {
    let rows = targets.iter().map(|it| {
        let TracedTargetFacts { percent, reason, revision, .. } = it;
        vec![
            revision.name.clone(),
            percent.to_string(),
            format!("{}/{}", revision.ready_pods, revision.all_pods),
            format!("{}/{}", revision.waiting, revision.max_waiting),
            it.status.map_or_else(|| reason.clone(), |status| format!("{status}: {reason}")),
        ]
    });
    let header = ["REVISION", "PERCENT", "PODS", "WAITING", "RESULT"];
    TextTable { header: header.map(str::to_owned).to_vec(), rows: rows.collect() }
}

fn pods_text(revision: &RevisionFacts) -> String {
    if revision.all_pods == 0 {
        return format!("\nRevision {} has no pod.\n", revision.name);
    }
    let header = ["POD", "ADDRESS", "STATE", "NODE", "ZONE", "IN-FLIGHT", "FREE-SLOTS"];
    let table = TextTable {
        header: header.map(str::to_owned).to_vec(),
        rows: revision.pods.iter().map(|it| pod_cells(it).to_vec()).collect(),
    };
    // A pod of a scaled Service has a row for each port.
    let shown: BTreeSet<&str> = revision.pods.iter().map(|it| it.uid.as_str()).collect();
    let more = match revision.all_pods.saturating_sub(shown.len()) {
        0 => String::new(),
        more => format!("… and {more} more\n"),
    };
    format!("\nPods of {}:\n{}{more}", revision.name, table.to_text())
}

fn pod_cells(pod: &RoutedPodFacts) -> [String; 7] {
    let or_dash = |text: &str| if text.is_empty() { "-" } else { text }.to_owned();
    let rank = match pod.rank {
        RoutedPodRank::Preferred => ",preferred",
        RoutedPodRank::Usual => "",
        RoutedPodRank::Standby => ",passed-over",
    };
    [
        pod.name.clone(),
        pod.address.map_or_else(|| "-".to_owned(), |it| it.to_string()),
        format!("{}{rank}", pod.state.name()),
        or_dash(&pod.node),
        or_dash(&pod.zone),
        pod.in_flight.to_string(),
        pod.free_slots.map_or_else(|| "-".to_owned(), |it| it.to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Reads the facts as an activator sends them, with these fields.
    fn facts(fields: Value) -> RequestTraceFacts {
        let mut object = json!({
            "activator": {"name": "a-1", "node": "n1", "zone": "a", "routesVersion": 7},
            "host": "shop.example", "path": "/cart", "entrypoint": "outside", "isTls": false,
            "outcome": "revision", "reason": "shop.example is a host of default/shop",
            "rules": [{"rule": "host \"shop.example\"", "isMatch": true}],
        });
        for (key, value) in fields.as_object().expect("fields") {
            object[key] = value.clone();
        }
        serde_json::from_value(object).expect("the activator's form")
    }

    fn revision(name: &str, pods: Value) -> Value {
        json!({
            "name": name, "isKnown": true, "protocol": "http1", "concurrencyLimit": 0,
            "restrictsClients": false, "waiting": 1, "maxWaiting": 10_000, "inFlight": 3,
            "readyPods": 1, "allPods": 2, "pods": pods,
        })
    }

    #[test]
    fn a_trace_shows_result_reason_and_revisions() {
        let pod = json!({
            "uid": "u", "name": "shop-1-abc", "address": "10.0.0.1:8080", "node": "n2", "zone": "b",
            "state": "ready", "rank": "preferred", "inFlight": 3,
        });
        let mut asleep = revision("default/shop-2", json!([]));
        (asleep["readyPods"], asleep["allPods"]) = (0.into(), 0.into());
        let facts = facts(json!({
            "isTls": true, "service": "default/shop", "tag": "default traffic",
            "certificate": {"name": "default/shop-tls", "rule": "mapping"},
            "targets": [
                {"percent": 90, "reason": "goes to pod shop-1-abc", "pod": pod,
                 "revision": revision("default/shop-1", json!([pod]))},
                {"percent": 10, "status": 404, "reason": "is refused: not found",
                 "revision": asleep},
            ],
            "notes": ["a note"],
        }));
        let expected = "\
Request for shop.example/cart at activator a-1 on node n1, zone a (entrypoint outside, TLS)
  Result:      goes to a Revision of default/shop
  Reason:      shop.example is a host of default/shop
  Tag:         default traffic
  Certificate: default/shop-tls (mapping)
  Note:        a note

REVISION         PERCENT   PODS   WAITING   RESULT
default/shop-1   90        1/2    1/10000   goes to pod shop-1-abc
default/shop-2   10        0/0    1/10000   404: is refused: not found
";
        assert_eq!(text(&facts, false), expected);
        let wide = "
Pods of default/shop-1:
POD          ADDRESS         STATE             NODE   ZONE   IN-FLIGHT   FREE-SLOTS
shop-1-abc   10.0.0.1:8080   ready,preferred   n2     b      3           -
… and 1 more

Revision default/shop-2 has no pod.
";
        assert_eq!(text(&facts, true), format!("{expected}{wide}"));
    }

    #[test]
    fn pods_that_are_left_out_are_counted_by_pods_and_not_by_ports() {
        let port = |port: u16| {
            json!({
                "uid": "u", "name": "postgres-0", "address": format!("10.0.0.1:{port}"),
                "servicePort": port, "node": "n2", "zone": "b", "state": "ready", "rank": "usual",
                "inFlight": 0,
            })
        };
        let revision = revision("shop/postgres", json!([port(5432), port(9187)]));
        let facts = facts(json!({
            "targets": [{"percent": 100, "reason": "waits", "revision": revision}],
        }));
        let text = text(&facts, true);
        assert!(text.ends_with("… and 1 more\n"), "{text}");
    }

    #[test]
    fn a_refusal_shows_what_was_tried() {
        let facts = facts(json!({
            "activator": {"name": "a-1", "node": "", "zone": "", "routesVersion": 0},
            "outcome": "refused", "status": 404, "reason": "no service for \"shop.example\"",
            "rules": [{"rule": "host \"shop.example\"", "isMatch": false}],
        }));
        let expected = "\
Request for shop.example/cart at activator a-1 (entrypoint outside)
  Result:      is refused with status 404
  Reason:      no service for \"shop.example\"
  Unknown:     the activator has received no routes from the controller yet
  Tried:       host \"shop.example\": no service
";
        assert_eq!(text(&facts, true), expected);
    }

    #[test]
    fn a_redirect_names_its_target() {
        let facts = facts(json!({
            "outcome": "redirect", "status": 301, "location": "https://shop.example/cart",
        }));
        let line = "  Result:      is redirected with status 301 to https://shop.example/cart\n";
        assert!(text(&facts, false).contains(line), "{}", text(&facts, false));
    }
}
