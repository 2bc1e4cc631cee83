//! Pure: the facts about the routes → a page for reading, without scripts and without resources of other pages.

use std::fmt::{self, Write as _};

use crate::route_facts::{
    HostRouteFacts, RevisionFacts, RoutedPodFacts, RoutedPodRank, RoutesFacts,
};

/// Beginning of the page. The style is part of it, so that the browser loads nothing.
const HEAD: &str = "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
    <title>Rouse activator</title><style>\
    body{font-family:sans-serif;margin:1em}\
    table{border-collapse:collapse}\
    th,td{border:1px solid #999;padding:.2em .5em;text-align:left;vertical-align:top}\
    </style></head><body>\n";

/// Text of a user or of an object in HTML, also inside an attribute in quotes.
struct EscapedHtml<'a>(&'a str);

impl fmt::Display for EscapedHtml<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|letter| match letter {
            '&' => out.write_str("&amp;"),
            '<' => out.write_str("&lt;"),
            '>' => out.write_str("&gt;"),
            '"' => out.write_str("&quot;"),
            '\'' => out.write_str("&#39;"),
            other => out.write_char(other),
        })
    }
}

/// Page that is being written. Each text from outside this file is escaped on its way in.
struct HtmlPage(String);

impl HtmlPage {
    fn write(&mut self, text: fmt::Arguments<'_>) {
        // A write to a String cannot fail.
        let _ = self.0.write_fmt(text);
    }

    fn heading(&mut self, text: &str) {
        self.write(format_args!("<h2>{}</h2>\n", EscapedHtml(text)));
    }

    fn paragraph(&mut self, text: &str) {
        self.write(format_args!("<p>{}</p>\n", EscapedHtml(text)));
    }

    fn table<const N: usize>(
        &mut self,
        header: [&str; N],
        rows: impl IntoIterator<Item = [String; N]>,
    ) {
        let cells = |cells: &[&str; N], tag: &str| {
            let cells = cells.iter().map(|it| format!("<{tag}>{}</{tag}>", EscapedHtml(it)));
            cells.collect::<String>()
        };
        self.write(format_args!("<table><tr>{}</tr>\n", cells(&header, "th")));
        for row in rows {
            let row = row.each_ref().map(String::as_str);
            self.write(format_args!("<tr>{}</tr>\n", cells(&row, "td")));
        }
        self.0.push_str("</table>\n");
    }
}

/// Returns the page `/debug/routes`.
pub(super) fn routes_html(facts: &RoutesFacts) -> String {
    let mut page = HtmlPage(HEAD.to_owned());
    let activator = &facts.activator;
    page.write(format_args!("<h1>Activator {}</h1>\n", EscapedHtml(&activator.name)));
    page.paragraph(&format!(
        "Node {}, zone {}, RouteTable version {}.",
        or_dash(&activator.node),
        or_dash(&activator.zone),
        activator.routes_version
    ));
    // An empty page would look like a cluster without services.
    if activator.routes_version == 0 {
        page.paragraph("No routes were received from the controller yet.");
    }
    write_hosts(&mut page, facts);
    page.heading("Revisions");
    write_revisions(&mut page, &facts.revisions);
    page.heading("Pods");
    write_pods(&mut page, &facts.revisions);
    page.heading("Certificates");
    let certificates = facts.certificates.iter().map(|it| {
        let more = it.all_hosts.saturating_sub(it.hosts.len());
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        [it.name.clone(), format!("{}{more}", it.hosts.join(", ")), it.not_after.clone()]
    });
    page.table(["Name", "Hosts", "Not after"], certificates);
    write_connections_and_policy(&mut page, facts);
    page.0.push_str("</body></html>\n");
    page.0
}

fn write_hosts(page: &mut HtmlPage, facts: &RoutesFacts) {
    page.heading("Hosts");
    page.write(format_args!(
        "<form><label>Hosts that contain <input name=\"host\" value=\"{}\"></label> \
         <button>Show</button></form>\n",
        EscapedHtml(&facts.filter)
    ));
    if facts.is_cut {
        page.paragraph(&format!(
            "Only the first {} of {} hosts are listed: name a part of the host.",
            facts.hosts.len(),
            facts.all_hosts
        ));
    }
    let header = ["Host", "Rule", "Service", "Path", "Revisions", "Certificate", "Policies"];
    page.table(header, facts.hosts.iter().map(host_row));
}

/// Returns the cells of a host: its service and Revisions, its certificate, and the policies of its requests.
fn host_row(host: &HostRouteFacts) -> [String; 7] {
    let targets: Vec<String> =
        host.targets.iter().map(|it| format!("{} {} %", it.revision, it.percent)).collect();
    let mut certificate = host
        .certificate
        .as_ref()
        .map_or_else(|| "-".to_owned(), |it| format!("{} ({})", it.name, it.rule.name()));
    // A Secret without a usable certificate is named, since it is the one that the user expects.
    if let Some(secret) = host.named_secret.as_ref()
        && host.certificate.as_ref().is_none_or(|it| it.name != *secret)
    {
        certificate += &format!("; {secret} is not in force");
    }
    let mut policies = Vec::new();
    if host.redirects_to_https {
        policies.push("http is redirected to https".to_owned());
    }
    policies.extend(host.host_rewrite.iter().map(|it| format!("pods receive host {it}")));
    if !host.tags.is_empty() {
        policies.push(format!("Knative-Serving-Tag: {}", host.tags.join(", ")));
    }
    [
        host.host.clone(),
        host.rule.name().to_owned(),
        host.service.clone(),
        host.path.clone(),
        if targets.is_empty() { "none: 503".to_owned() } else { targets.join(", ") },
        certificate,
        policies.join("; "),
    ]
}

/// Writes the table of Revisions, with their pods and their requests at this activator.
fn write_revisions(page: &mut HtmlPage, revisions: &[RevisionFacts]) {
    let rows = revisions.iter().map(|it| {
        let protocol = it.protocol.clone().unwrap_or_default();
        let state = if it.is_known { protocol } else { "not in the RouteTable: 404".to_owned() };
        let limit = match it.concurrency_limit {
            0 => "none".to_owned(),
            limit => limit.to_string(),
        };
        let clients = if it.restricts_clients { "by NetworkPolicies" } else { "all" };
        [
            it.name.clone(),
            state,
            format!("{}/{}", it.ready_pods, it.all_pods),
            format!("{}/{}", it.waiting, it.max_waiting),
            it.in_flight.to_string(),
            limit,
            clients.to_owned(),
        ]
    });
    let header =
        ["Revision", "Protocol", "Pods ready", "Waiting", "In flight", "Hard limit", "Clients"];
    page.table(header, rows);
}

fn write_pods(page: &mut HtmlPage, revisions: &[RevisionFacts]) {
    let pods =
        revisions.iter().flat_map(|it| it.pods.iter().map(move |pod| pod_row(&it.name, pod)));
    let header = ["Revision", "Pod", "Address", "Node", "Zone", "State", "In flight", "Free slots"];
    page.table(header, pods);
    let hidden = revisions.iter().filter(|it| {
        // A pod of a scaled Service may have several rows, so that rows cannot be compared with pods.
        it.pods.iter().map(|pod| &pod.uid).collect::<std::collections::BTreeSet<_>>().len()
            < it.all_pods
    });
    let hidden: Vec<&str> = hidden.map(|it| it.name.as_str()).collect();
    if !hidden.is_empty() {
        page.paragraph(&format!("Not all pods are listed of {}.", hidden.join(", ")));
    }
}

fn pod_row(revision: &str, pod: &RoutedPodFacts) -> [String; 8] {
    let rank = match pod.rank {
        RoutedPodRank::Preferred => ", preferred by hints",
        RoutedPodRank::Usual => "",
        RoutedPodRank::Standby => ", passed over",
    };
    let standby = if pod.has_standby_order { ", standby" } else { "" };
    let port = pod.service_port.map(|it| format!(" (port {it})")).unwrap_or_default();
    [
        revision.to_owned(),
        pod.name.clone(),
        pod.address.map_or_else(|| "-".to_owned(), |it| format!("{it}{port}")),
        or_dash(&pod.node).to_owned(),
        or_dash(&pod.zone).to_owned(),
        format!("{}{standby}{rank}", pod.state.name()),
        pod.in_flight.to_string(),
        pod.free_slots.map_or_else(|| "-".to_owned(), |it| it.to_string()),
    ]
}

/// Writes the open connections by kind, and the settings for requests from outside.
fn write_connections_and_policy(page: &mut HtmlPage, facts: &RoutesFacts) {
    let connections = &facts.connections;
    page.heading("Client connections");
    let kinds = [
        ("HTTP/1.1", connections.http1),
        ("HTTP/2", connections.http2),
        ("raw TCP", connections.tcp),
        ("without a first byte or in a handshake", connections.opening),
        ("of HTTP with TLS", connections.tls),
    ];
    page.table(["Kind", "Open"], kinds.map(|(kind, count)| [kind.to_owned(), count.to_string()]));
    page.heading("Policy for requests from outside");
    let edge = &facts.edge;
    let yes_or_no = |it: bool| if it { "yes" } else { "no" }.to_owned();
    let names = |all: &[String]| if all.is_empty() { "none".to_owned() } else { all.join(", ") };
    let settings = [
        ("Trusted proxies", names(&edge.trusted_proxies)),
        ("PROXY protocol of trusted proxies", yes_or_no(edge.requires_proxy_protocol)),
        ("Upgrades besides websocket", names(&edge.allowed_upgrades)),
        ("Header names with an underscore", yes_or_no(edge.allows_underscores)),
        ("Port of https in redirects", edge.https_port.unwrap_or(443).to_string()),
        ("Trusted ingresses", names(&edge.trusted_ingresses)),
    ];
    page.table(["Setting", "Value"], settings.map(|(name, value)| [name.to_owned(), value]));
}

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route_facts::{
        CertificateChoiceFacts, CertificateRule, HostCertificateFacts, HostRule, RoutedPodState,
        TargetShareFacts,
    };

    /// Text that would be markup, if it were not escaped, in content and in attributes.
    const MARKUP: &str = "\"'><script>alert(1)</script>&amp;";

    fn facts(text: &str) -> RoutesFacts {
        let text = text.to_owned();
        let mut facts = RoutesFacts { filter: text.clone(), ..RoutesFacts::default() };
        facts.activator.name.clone_from(&text);
        facts.activator.node.clone_from(&text);
        facts.activator.zone.clone_from(&text);
        facts.hosts = vec![HostRouteFacts {
            host: text.clone(),
            rule: HostRule::Route,
            service: text.clone(),
            path: text.clone(),
            targets: vec![TargetShareFacts { revision: text.clone(), percent: 100 }],
            redirects_to_https: true,
            host_rewrite: Some(text.clone()),
            tags: vec![text.clone()],
            certificate: Some(CertificateChoiceFacts {
                name: text.clone(),
                rule: CertificateRule::Default,
            }),
            named_secret: Some(format!("{text}.")),
        }];
        facts.revisions = vec![RevisionFacts {
            name: text.clone(),
            protocol: Some(text.clone()),
            is_known: true,
            all_pods: 2,
            pods: vec![RoutedPodFacts {
                uid: text.clone(),
                name: text.clone(),
                address: None,
                service_port: None,
                node: text.clone(),
                zone: text.clone(),
                state: RoutedPodState::Ready,
                rank: RoutedPodRank::Standby,
                in_flight: 3,
                free_slots: Some(1),
                has_standby_order: true,
            }],
            ..RevisionFacts::default()
        }];
        facts.certificates = vec![HostCertificateFacts {
            name: text.clone(),
            hosts: vec![text.clone()],
            all_hosts: 3,
            not_after_s: 0,
            not_after: text.clone(),
        }];
        facts.edge.trusted_proxies = vec![text.clone()];
        facts.edge.trusted_ingresses = vec![text.clone()];
        facts.edge.allowed_upgrades = vec![text];
        facts
    }

    #[test]
    fn no_text_of_a_user_is_markup() {
        let page = routes_html(&facts(MARKUP));
        assert!(!page.contains("<script") && !page.contains("'>"), "{page}");
        let escaped = "&quot;&#39;&gt;&lt;script&gt;alert(1)&lt;/script&gt;&amp;amp;";
        let harmless = routes_html(&facts("HARMLESS"));
        assert_eq!(harmless.matches("HARMLESS").count(), page.matches(escaped).count());
        assert_eq!(page.replace(escaped, "HARMLESS"), harmless, "nothing but the texts differs");
    }

    #[test]
    fn the_page_loads_nothing_and_runs_nothing() {
        let page = routes_html(&facts("a"));
        for foreign in ["<script", "<link", "<img", "src=", "href=", "@import", "url(", "onclick"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        assert!(!page.contains("method="), "a form can only ask for the page again");
    }

    #[test]
    fn what_is_left_out_is_said() {
        let mut facts = facts("a");
        facts.is_cut = true;
        facts.all_hosts = 1001;
        let page = routes_html(&facts);
        assert!(page.contains("Only the first 1 of 1001 hosts are listed"), "{page}");
        assert!(page.contains("Not all pods are listed of a."), "{page}");
        assert!(page.contains("a and 2 more"), "{page}");
        assert!(page.contains("No routes were received"), "{page}");
    }
}
