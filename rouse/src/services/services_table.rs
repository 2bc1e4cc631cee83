//! Pure: facts about an agent's services → rows of a table, and remarks.

use agent::service_facts::{FrontendFacts, FrontendMode, NodeServices};

use crate::table::TextTable;

/// Names of all columns.
const COLUMNS: [&str; 8] =
    ["NAMESPACE", "NAME", "ADDRESS", "MODE", "ENDPOINTS", "AFFINITY", "SOURCE", "REASON"];

/// Keeps the services of a namespace (`None`: of all), sorted by name and address.
pub(super) fn select(services: &mut NodeServices, namespace: Option<&str>) {
    services.services.retain(|it| namespace.is_none_or(|namespace| it.namespace == namespace));
    services.services.sort_by(|one, two| {
        let key = |it: &FrontendFacts| (it.namespace.clone(), it.name.clone(), it.address);
        key(one).cmp(&key(two)).then_with(|| one.protocol.cmp(&two.protocol))
    });
}

/// Returns the table of services.
pub(super) fn table(services: &NodeServices, has_namespaces: bool, is_wide: bool) -> TextTable {
    let is_shown = |column: &str| match column {
        "NAMESPACE" => has_namespaces,
        "REASON" => is_wide,
        _ => true,
    };
    let shown = |cells: [String; 8]| {
        let cells = COLUMNS.into_iter().zip(cells).filter(|(column, _)| is_shown(column));
        cells.map(|(_, cell)| cell).collect::<Vec<String>>()
    };
    TextTable {
        header: shown(COLUMNS.map(str::to_owned)),
        rows: services.services.iter().map(|it| shown(cells(it))).collect(),
    }
}

fn cells(facts: &FrontendFacts) -> [String; 8] {
    // What the agent does not know is not 0.
    let count = |it: Option<usize>| it.map_or_else(|| "?".to_owned(), |it| it.to_string());
    let affinity = match facts.affinity_seconds {
        0 => "-".to_owned(),
        seconds => format!("{seconds}s"),
    };
    [
        facts.namespace.clone(),
        facts.name.clone(),
        format!("{}/{}", facts.address, facts.protocol),
        facts.mode.name().to_owned(),
        format!("{}/{}", count(facts.listed), count(facts.known)),
        affinity,
        facts.source.name().to_owned(),
        facts.reason.clone().unwrap_or_else(|| "-".to_owned()),
    ]
}

/// Returns remarks about the agent and about services that it cannot serve as usual.
pub(super) fn remarks(services: &NodeServices, namespace: Option<&str>) -> Vec<String> {
    let node = &services.node;
    let mut remarks = Vec::new();
    if !node.unknown.is_empty() {
        remarks.push(format!(
            "The agent of node {} does not know all services yet: it waits for {}. What an earlier \
             agent wrote stays in force meanwhile, and is not shown.",
            node.name,
            node.unknown.join(", ")
        ));
    }
    let without_room =
        services.services.iter().filter(|it| it.mode == FrontendMode::NoRoom).count();
    if without_room > 0 {
        remarks.push(format!(
            "{without_room} addresses have no room in the kernel's maps of node {}: -o wide shows \
             why.",
            node.name
        ));
    }
    // What is not known is not absent.
    if services.services.is_empty() && node.unknown.is_empty() {
        let scope = match namespace {
            Some(namespace) => format!(" in {namespace} namespace"),
            None => String::new(),
        };
        remarks.push(format!(
            "Node {} serves no service{scope} (--clusterip {}).",
            node.name, node.clusterip
        ));
    }
    remarks
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Reads the facts as an agent sends them.
    fn services() -> NodeServices {
        serde_json::from_value(json!({
            "node": {"name": "n1", "zone": "a", "clusterip": "all"},
            "services": [
                {"namespace": "default", "name": "web", "source": "service",
                 "address": "10.96.0.9:80", "protocol": "TCP", "mode": "pods", "listed": 2, "known": 3, "affinitySeconds": 60},
                {"namespace": "default", "name": "hello", "source": "route",
                 "address": "[fd00::7]:80", "protocol": "TCP", "mode": "activators", "listed": 0, "known": null},
                {"namespace": "b", "name": "big", "source": "service", "address": "10.96.0.1:80",
                 "protocol": "TCP", "mode": "no-room", "reason": "map SLOTS is full",
                 "listed": null, "known": 5000},
            ],
        }))
        .expect("the agent's form")
    }

    #[test]
    fn a_row_shows_mode_and_endpoints_and_nothing_unknown_as_zero() {
        let mut services = services();
        select(&mut services, Some("default"));
        let expected = "\
NAME    ADDRESS            MODE         ENDPOINTS   AFFINITY   SOURCE
hello   [fd00::7]:80/TCP   activators   0/?         -          route
web     10.96.0.9:80/TCP   pods         2/3         60s        service
";
        assert_eq!(table(&services, false, false).to_text(), expected);
        assert_eq!(remarks(&services, Some("default")), [""; 0]);
    }

    #[test]
    fn all_namespaces_and_reasons_have_columns_of_their_own() {
        let mut services = services();
        select(&mut services, None);
        let table = table(&services, true, true);
        assert_eq!(table.header.first().map(String::as_str), Some("NAMESPACE"));
        assert_eq!(table.rows[0][0], "b");
        assert_eq!(table.rows[0][4], "?/5000");
        assert_eq!(table.rows[0][7], "map SLOTS is full");
        let remarks = remarks(&services, None);
        assert!(remarks[0].starts_with("1 addresses have no room"), "{remarks:?}");
    }

    #[test]
    fn an_agent_without_services_says_in_which_mode_it_is() {
        let mut services = services();
        select(&mut services, Some("other"));
        let expected = "Node n1 serves no service in other namespace (--clusterip all).";
        assert_eq!(remarks(&services, Some("other")), [expected]);
        services.node.unknown = vec!["EndpointSlice".into()];
        let unknown = remarks(&services, Some("other"));
        assert_eq!(unknown.len(), 1, "{unknown:?}");
        assert!(unknown[0].contains("it waits for EndpointSlice. What an earlier"), "{unknown:?}");
    }
}
