//! Pure: the choice for a connect → text for reading.

use agent::service_facts::{CandidateFacts, FrontendFacts, TraceFacts, TraceOutcome};

use crate::table::TextTable;

/// Most candidates that the text shows without `-o wide`.
const SHOWN_CANDIDATES: usize = 20;

/// Returns the text of a trace. `from` is the name of the pod that connects, `notes` are its properties.
pub(super) fn text(
    facts: &TraceFacts,
    from: Option<&str>,
    notes: &[String],
    is_wide: bool,
) -> String {
    let node = &facts.node;
    let zone = match node.zone.as_str() {
        "" => "without a zone".to_owned(),
        zone => format!("zone {zone}"),
    };
    let client = match from {
        Some(pod) => format!("pod {pod} on node {}", node.name),
        None => format!("node {}", node.name),
    };
    let mut text = format!("Connect from {client} ({zone}) to {}/{}\n", facts.to, facts.protocol);
    let frontend = facts.frontend.as_ref().map_or_else(|| "none".to_owned(), frontend_text);
    let mut lines = vec![
        ("Result", outcome_text(facts.outcome).to_owned()),
        ("Reason", facts.reason.clone()),
        ("Frontend", frontend),
    ];
    lines.extend(facts.hints.clone().map(|it| ("Hints", it)));
    lines.extend(facts.kube_proxy.clone().map(|it| ("kube-proxy", it)));
    lines.extend(facts.exceptions.iter().map(|it| ("Except", it.clone())));
    if !node.unknown.is_empty() {
        let unknown = node.unknown.join(", ");
        lines.push(("Unknown", format!("the agent has no list yet of {unknown}")));
    }
    lines.extend(notes.iter().map(|it| ("Client", it.clone())));
    for (title, line) in lines {
        text += &format!("  {:12}{line}\n", format!("{title}:"));
    }
    if !facts.candidates.is_empty() {
        text += &candidates_text(&facts.candidates, is_wide);
    }
    text
}

fn outcome_text(outcome: TraceOutcome) -> &'static str {
    match outcome {
        TraceOutcome::Endpoint => "goes to an endpoint",
        TraceOutcome::Activator => "goes to an activator",
        TraceOutcome::Refused => "is refused (ECONNREFUSED; UDP before Linux 5.18: EPERM)",
        TraceOutcome::Unchanged => "goes on unchanged",
    }
}

fn frontend_text(facts: &FrontendFacts) -> String {
    let mode = facts.mode.name();
    let mut text =
        format!("{}/{} ({}), mode {mode}", facts.namespace, facts.name, facts.source.name());
    // What the agent does not know is not 0.
    if let (Some(listed), Some(known)) = (facts.listed, facts.known) {
        text += &format!(", {listed} of {known} endpoints in the list");
    }
    if let Some(reason) = &facts.reason {
        text += &format!(": {reason}");
    }
    text
}

/// Returns the table of candidates: those that the connect may go to first.
fn candidates_text(candidates: &[CandidateFacts], is_wide: bool) -> String {
    let limit = if is_wide { candidates.len() } else { SHOWN_CANDIDATES };
    let header = ["", "ENDPOINT", "STATE", "NODE", "ZONE", "HINTS", "OPEN", "DECISION"];
    let table = TextTable {
        header: header.map(str::to_owned).to_vec(),
        rows: candidates.iter().take(limit).map(|it| candidate_cells(it).to_vec()).collect(),
    };
    let more = match candidates.len().saturating_sub(limit) {
        0 => String::new(),
        more => format!("… and {more} more: -o wide shows them\n"),
    };
    format!("\n{}{more}", table.to_text())
}

fn candidate_cells(facts: &CandidateFacts) -> [String; 8] {
    let or_dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    let hints = [("zones", &facts.zone_hints), ("nodes", &facts.node_hints)];
    let hints = hints.iter().filter(|(_, names)| !names.is_empty());
    let hints: Vec<String> =
        hints.map(|(kind, names)| format!("{kind} {}", names.join(","))).collect();
    let open = facts.usage.map(|it| it.open_connections.to_string());
    [
        if facts.is_listed { "*" } else { "" }.to_owned(),
        facts.address.to_string(),
        facts.state.name().to_owned(),
        or_dash(facts.node.clone()),
        or_dash(facts.zone.clone()),
        or_dash(hints.join("; ")),
        or_dash(open.unwrap_or_default()),
        facts.reason.clone(),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Reads the facts as an agent sends them, with these fields.
    fn facts(fields: Value) -> TraceFacts {
        let mut object = json!({
            "node": {"name": "n1", "zone": "a", "clusterip": "all"}, "to": "10.96.0.9:80",
            "protocol": "TCP", "outcome": "endpoint", "reason": "a random one of 1",
        });
        for (key, value) in fields.as_object().expect("fields") {
            object[key] = value.clone();
        }
        serde_json::from_value(object).expect("the agent's form")
    }

    fn candidate(address: &str, fields: Value) -> Value {
        let mut object = json!({
            "address": address, "state": "ready", "node": "n2", "zone": "b", "isSelected": true,
            "isListed": true, "reason": "selected",
        });
        for (key, value) in fields.as_object().expect("fields") {
            object[key] = value.clone();
        }
        object
    }

    #[test]
    fn a_trace_shows_result_reason_and_candidates() {
        let usage = json!({"openConnections": 3, "isUnanswered": false});
        let facts = facts(json!({
            "frontend": {"namespace": "default", "name": "web", "source": "service",
                         "address": "10.96.0.9:80", "protocol": "TCP", "mode": "pods", "listed": 1,
                         "known": 2},
            "hints": "those for zones count",
            "exceptions": ["those of kernel threads go on unchanged"],
            "candidates": [
                candidate("10.0.0.1:8080", json!({"zoneHints": ["a", "b"], "usage": usage})),
                candidate("10.0.0.2:8080", json!({
                    "isListed": false, "isSelected": false, "node": "", "zoneHints": ["c"],
                    "reason": "its hints are for other zones",
                })),
            ],
        }));
        let expected = "\
Connect from pod web-1 on node n1 (zone a) to 10.96.0.9:80/TCP
  Result:     goes to an endpoint
  Reason:     a random one of 1
  Frontend:   default/web (service), mode pods, 1 of 2 endpoints in the list
  Hints:      those for zones count
  Except:     those of kernel threads go on unchanged
  Client:     a note

    ENDPOINT        STATE   NODE   ZONE   HINTS       OPEN   DECISION
*   10.0.0.1:8080   ready   n2     b      zones a,b   3      selected
    10.0.0.2:8080   ready   -      b      zones c     -      its hints are for other zones
";
        assert_eq!(text(&facts, Some("web-1"), &["a note".into()], false), expected);
    }

    #[test]
    fn an_unchanged_connect_shows_what_kube_proxy_does() {
        let facts = facts(json!({
            "node": {"name": "n1", "zone": "", "clusterip": "off", "unknown": ["Service"]},
            "outcome": "unchanged", "reason": "no Service", "kubeProxy": "kube-proxy has no rule",
        }));
        let expected = "\
Connect from node n1 (without a zone) to 10.96.0.9:80/TCP
  Result:     goes on unchanged
  Reason:     no Service
  Frontend:   none
  kube-proxy: kube-proxy has no rule
  Unknown:    the agent has no list yet of Service
";
        assert_eq!(text(&facts, None, &[], false), expected);
    }

    #[test]
    fn many_candidates_are_cut_unless_all_are_asked_for() {
        let candidates: Vec<Value> =
            (0..25).map(|it| candidate(&format!("10.0.0.{it}:80"), json!({}))).collect();
        let facts = facts(json!({"candidates": candidates}));
        let lines = |is_wide| text(&facts, None, &[], is_wide).lines().count();
        let cut = text(&facts, None, &[], false);
        assert!(cut.ends_with("… and 5 more: -o wide shows them\n"), "{cut}");
        assert_eq!(lines(true), lines(false) + 5 - 1);
    }
}
