//! Pure: facts about an activator's routes → rows of a table, and remarks.

use activator::route_facts::{HostRouteFacts, RoutesFacts, TargetShareFacts};

use crate::table::TextTable;

/// Names of all columns.
const COLUMNS: [&str; 11] = [
    "HOST",
    "RULE",
    "SERVICE",
    "REVISION",
    "PERCENT",
    "PODS",
    "WAITING",
    "CERTIFICATE",
    "NOT-AFTER",
    "PATH",
    "POLICIES",
];
/// Columns of the wide table only.
const WIDE_COLUMNS: [&str; 4] = ["SERVICE", "NOT-AFTER", "PATH", "POLICIES"];

/// Returns the table of hosts, with a row for each Revision of a host.
pub(super) fn table(facts: &RoutesFacts, is_wide: bool) -> TextTable {
    let is_shown = |column: &str| is_wide || !WIDE_COLUMNS.contains(&column);
    let shown = |cells: [String; 11]| {
        let cells = COLUMNS.into_iter().zip(cells).filter(|(column, _)| is_shown(column));
        cells.map(|(_, cell)| cell).collect::<Vec<String>>()
    };
    let rows = facts.hosts.iter().flat_map(|host| {
        let mut targets: Vec<Option<&TargetShareFacts>> = host.targets.iter().map(Some).collect();
        // A host without a Revision has a row, too: its requests get 503.
        if targets.is_empty() {
            targets.push(None);
        }
        targets.into_iter().map(|target| shown(cells(facts, host, target))).collect::<Vec<_>>()
    });
    TextTable { header: shown(COLUMNS.map(str::to_owned)), rows: rows.collect() }
}

/// Returns the cells of a host with one of its Revisions.
fn cells(
    facts: &RoutesFacts,
    host: &HostRouteFacts,
    target: Option<&TargetShareFacts>,
) -> [String; 11] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let revision = target.and_then(|target| {
        facts.revisions.iter().find(|revision| revision.name == target.revision)
    });
    let certificate = host.certificate.as_ref();
    let not_after = certificate.and_then(|chosen| {
        let known = facts.certificates.iter().find(|it| it.name == chosen.name)?;
        Some(known.not_after.clone())
    });
    [
        host.host.clone(),
        host.rule.name().to_owned(),
        host.service.clone(),
        or_dash(target.map(|it| it.revision.clone())),
        or_dash(target.map(|it| it.percent.to_string())),
        or_dash(revision.map(|it| format!("{}/{}", it.ready_pods, it.all_pods))),
        or_dash(revision.map(|it| it.waiting.to_string())),
        or_dash(certificate.map(|it| it.name.clone())),
        or_dash(not_after),
        host.path.clone(),
        or_dash(format_policies(host)),
    ]
}

fn format_policies(host: &HostRouteFacts) -> Option<String> {
    let redirect = host.redirects_to_https.then(|| "https".to_owned());
    let rewrite = host.host_rewrite.as_ref().map(|it| format!("rewrite={it}"));
    let tags = (!host.tags.is_empty()).then(|| format!("tags={}", host.tags.join(",")));
    let all: Vec<String> = [redirect, rewrite, tags].into_iter().flatten().collect();
    (!all.is_empty()).then(|| all.join(" "))
}

/// Returns remarks about the activator that has responded, and about hosts that are not as a user expects.
pub(super) fn remarks(facts: &RoutesFacts) -> Vec<String> {
    let mut remarks = Vec::new();
    if facts.activator.routes_version == 0 {
        remarks.push(format!("The {} has received no routes yet.", facts.activator));
    } else if facts.hosts.is_empty() {
        let filter = match facts.filter.as_str() {
            "" => String::new(),
            filter => format!(" that contains {filter:?}"),
        };
        remarks.push(format!("The {} routes no host{filter}.", facts.activator));
    } else {
        remarks.push(format!("Waiting requests are those at {}.", facts.activator));
    }
    if facts.is_cut {
        remarks.push(format!(
            "Only the first {} of {} hosts are listed: name a part of the host.",
            facts.hosts.len(),
            facts.all_hosts
        ));
    }
    for host in &facts.hosts {
        // The user expects this certificate, and clients get another one or none.
        if let Some(secret) = &host.named_secret
            && host.certificate.as_ref().is_none_or(|it| it.name != *secret)
        {
            remarks
                .push(format!("The certificate of {secret}, for {}, is not in force.", host.host));
        }
    }
    remarks
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Reads the facts as an activator sends them.
    fn facts(hosts: Value) -> RoutesFacts {
        let revision = json!({
            "name": "default/shop-1", "isKnown": true, "protocol": "http1", "concurrencyLimit": 0,
            "restrictsClients": false, "waiting": 4, "maxWaiting": 10_000, "inFlight": 3,
            "readyPods": 1, "allPods": 2, "pods": [],
        });
        let certificate = json!({
            "name": "default/tls", "hosts": ["*.example"], "allHosts": 1,
            "notAfterS": 4_102_444_800_i64, "notAfter": "2100-01-01T00:00:00Z",
        });
        let count = hosts.as_array().map_or(0, Vec::len);
        serde_json::from_value(json!({
            "activator": {"name": "a-1", "node": "n1", "zone": "", "routesVersion": 7},
            "hosts": hosts, "allHosts": count, "isCut": false, "revisions": [revision],
            "certificates": [certificate],
            "connections": {"opening": 0, "http1": 1, "http2": 0, "tcp": 0, "tls": 0},
            "edge": {"trustedProxies": [], "requiresProxyProtocol": false, "allowedUpgrades": [],
                     "allowsUnderscores": false},
        }))
        .expect("the activator's form")
    }

    fn shop() -> Value {
        json!({
            "host": "shop.example", "rule": "domain-mapping", "service": "default/shop",
            "path": "activator",
            "targets": [{"revision": "default/shop-1", "percent": 90},
                        {"revision": "default/shop-2", "percent": 10}],
            "redirectsToHttps": true, "hostRewrite": "shop.default.svc", "tags": ["a", "b"],
            "certificate": {"name": "default/tls", "rule": "wildcard"},
            "namedSecret": "default/own",
        })
    }

    #[test]
    fn a_host_has_a_row_for_each_revision_and_nothing_unknown_is_zero() {
        let asleep = json!({
            "host": "new.example", "rule": "route", "service": "default/new", "path": "direct",
            "targets": [],
        });
        let facts = facts(json!([asleep, shop()]));
        let expected = "\
HOST           RULE             REVISION         PERCENT   PODS   WAITING   CERTIFICATE
new.example    route            -                -         -      -         -
shop.example   domain-mapping   default/shop-1   90        1/2    4         default/tls
shop.example   domain-mapping   default/shop-2   10        -      -         default/tls
";
        assert_eq!(table(&facts, false).to_text(), expected);
        let wide = table(&facts, true);
        assert_eq!(wide.header.len(), COLUMNS.len());
        let row = &wide.rows[1];
        assert_eq!((row[2].as_str(), row[8].as_str()), ("default/shop", "2100-01-01T00:00:00Z"));
        assert_eq!(row[10], "https rewrite=shop.default.svc tags=a,b");
    }

    #[test]
    fn remarks_name_the_activator_and_what_is_missing() {
        let mut facts = facts(json!([shop()]));
        let place = "activator a-1 on node n1";
        let secret = "The certificate of default/own, for shop.example, is not in force.";
        assert_eq!(
            remarks(&facts),
            [format!("Waiting requests are those at {place}."), secret.into()]
        );
        facts.hosts.clear();
        facts.filter = "shop".into();
        let none = format!("The {place} routes no host that contains \"shop\".");
        assert_eq!(remarks(&facts), [none]);
        facts.activator.routes_version = 0;
        assert_eq!(remarks(&facts), [format!("The {place} has received no routes yet.")]);
        facts.is_cut = true;
        facts.all_hosts = 1001;
        assert!(remarks(&facts)[1].starts_with("Only the first 0 of 1001 hosts"));
    }
}
