//! Pure: content of the bootstrap file: what a node needs after a reboot, before an API server, DNS or a controller
//! answers.
//!
//! Pass in what the sources tell. What is not known yet stays as the file had it.

use std::{collections::BTreeSet, net::SocketAddr};

use serde::{Deserialize, Serialize};

/// Name and version of the format. A change that earlier agents would misread gets another version.
const FORMAT: &str = "rouse-bootstrap/1";

/// One frontend of a Service of the cluster, with its list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BootstrapFrontend {
    /// Namespace of the Service.
    pub namespace: String,
    /// Name of the Service.
    pub name: String,
    /// IP protocol number.
    pub protocol: u8,
    /// ClusterIP and port of the Service.
    pub address: SocketAddr,
    /// Seconds for which a client keeps its endpoint after a connect; 0: it keeps none.
    pub affinity_seconds: u32,
    /// Endpoints for new connections on this node.
    pub endpoints: BTreeSet<SocketAddr>,
}

/// Facts that the cluster's Services tell about the start of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BootstrapServices {
    /// Endpoints of the Service `default/kubernetes`.
    pub api_servers: BTreeSet<SocketAddr>,
    /// Frontends of the Services that a node must reach first, as far as this node serves them. Their lists may be
    /// empty.
    pub frontends: Vec<BootstrapFrontend>,
}

/// Content of the bootstrap file of one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BootstrapDocument {
    format: String,
    node: String,
    /// Id of the boot in which the API server last told the Services; `None`: it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot: Option<String>,
    /// Endpoints of the Service `default/kubernetes`.
    #[serde(default)]
    pub api_servers: BTreeSet<SocketAddr>,
    /// Addresses of controllers.
    #[serde(default)]
    pub controllers: BTreeSet<SocketAddr>,
    /// Addresses of autoscalers.
    #[serde(default)]
    pub autoscalers: BTreeSet<SocketAddr>,
    /// Frontends of the Services that a node must reach first; each has an endpoint.
    #[serde(default)]
    pub frontends: Vec<BootstrapFrontend>,
}

/// Fields that documents of all versions have.
#[derive(Deserialize)]
struct BootstrapHeader {
    format: String,
    node: String,
}

/// Reason that a bootstrap file is of no use.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// The text is no JSON document, or a field has another form.
    #[error("it is no bootstrap file of an agent")]
    Syntax(#[source] serde_json::Error),
    /// Another version of the agent has written the file.
    #[error("its format is {found:?}, and this agent reads {FORMAT:?}")]
    Format {
        /// Format that the file names.
        found: String,
    },
    /// The agent of another node has written the file.
    #[error("it is of node {found:?}, and this node is {node:?}")]
    Node {
        /// Node that the file names.
        found: String,
        /// Name of this node.
        node: String,
    },
}

impl BootstrapDocument {
    /// Starts with nothing known.
    pub fn new(node: &str) -> Self {
        Self {
            format: FORMAT.to_owned(),
            node: node.to_owned(),
            boot: None,
            api_servers: BTreeSet::new(),
            controllers: BTreeSet::new(),
            autoscalers: BTreeSet::new(),
            frontends: Vec::new(),
        }
    }

    /// Reads the text of the file of this node.
    pub fn parse(text: &str, node: &str) -> Result<Self, BootstrapError> {
        // First alone: the other fields of another version may have another form.
        let BootstrapHeader { format, node: found } =
            serde_json::from_str(text).map_err(BootstrapError::Syntax)?;
        if format != FORMAT {
            return Err(BootstrapError::Format { found: format });
        }
        if found != node {
            return Err(BootstrapError::Node { found, node: node.to_owned() });
        }
        let mut document: Self = serde_json::from_str(text).map_err(BootstrapError::Syntax)?;
        // An empty list would refuse all connects.
        document.frontends.retain(|it| !it.endpoints.is_empty());
        Ok(document)
    }

    /// Returns the text of the file.
    pub fn to_text(&self) -> String {
        let json = serde_json::to_string_pretty(self).expect("its maps have text as keys");
        json + "\n"
    }

    /// Replaces what the Services of the cluster tell.
    ///
    /// Servers that stop withdraw their own addresses one by one, for example when all nodes are shut down. So a list
    /// that has become empty keeps its last endpoints while its Service exists.
    pub fn set_services(&mut self, services: &BootstrapServices) {
        if !services.api_servers.is_empty() {
            self.api_servers.clone_from(&services.api_servers);
        }
        let before = std::mem::take(&mut self.frontends);
        let with_last_endpoints = |next: &BootstrapFrontend| {
            let is_same = |last: &&BootstrapFrontend| {
                last.protocol == next.protocol && last.address == next.address
            };
            let last = before.iter().find(is_same).filter(|_| next.endpoints.is_empty());
            let endpoints = last.map_or(&next.endpoints, |it| &it.endpoints).clone();
            BootstrapFrontend { endpoints, ..next.clone() }
        };
        let frontends = services.frontends.iter().map(with_last_endpoints);
        self.frontends = frontends.filter(|it| !it.endpoints.is_empty()).collect();
    }

    /// Records that the API server has told the Services in the boot with this id.
    pub fn set_boot(&mut self, boot: Option<&str>) {
        self.boot = boot.map(str::to_owned);
    }

    /// Returns the lists that fill empty maps in the boot with this id.
    ///
    /// In the boot in which they were last told, the maps are empty for another reason than a reboot. An agent in mode
    /// `off` may have emptied them days ago, and kept no list since.
    pub fn lists_for_boot(&self, boot: Option<&str>) -> &[BootstrapFrontend] {
        let is_same_boot = boot.is_some() && self.boot.as_deref() == boot;
        if is_same_boot { &[] } else { &self.frontends }
    }

    /// Replaces the controllers, if any are known.
    pub fn set_controllers(&mut self, addresses: BTreeSet<SocketAddr>) {
        if !addresses.is_empty() {
            self.controllers = addresses;
        }
    }

    /// Replaces the autoscalers, if any are known.
    pub fn set_autoscalers(&mut self, addresses: BTreeSet<SocketAddr>) {
        if !addresses.is_empty() {
            self.autoscalers = addresses;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 244, 0, last], 53))
    }

    fn frontend(number: u8, endpoints: &[u8]) -> BootstrapFrontend {
        BootstrapFrontend {
            namespace: "kube-system".into(),
            name: "kube-dns".into(),
            protocol: 6,
            address: SocketAddr::from(([10, 96, 0, number], 53)),
            affinity_seconds: 0,
            endpoints: endpoints.iter().copied().map(at).collect(),
        }
    }

    fn services(api_servers: &[u8], frontends: Vec<BootstrapFrontend>) -> BootstrapServices {
        BootstrapServices { api_servers: api_servers.iter().copied().map(at).collect(), frontends }
    }

    fn document() -> BootstrapDocument {
        let mut document = BootstrapDocument::new("n1");
        document.set_services(&services(&[1], vec![frontend(10, &[2, 3])]));
        document.set_controllers([at(4)].into());
        document.set_autoscalers([at(5)].into());
        document
    }

    #[test]
    fn the_text_is_read_back() {
        let text = document().to_text();
        assert_eq!(BootstrapDocument::parse(&text, "n1").expect("just written"), document());
        let six = "[fd00::a]:53".parse().expect("an address");
        let mut document = document();
        document.frontends[0].address = six;
        document.frontends[0].endpoints.insert(six);
        let read = BootstrapDocument::parse(&document.to_text(), "n1");
        assert_eq!(read.expect("just written"), document);
    }

    #[test]
    fn a_foreign_file_is_told_with_its_reason() {
        let good = document().to_text();
        let syntax = "it is no bootstrap file of an agent";
        let format =
            "its format is \"rouse-bootstrap/2\", and this agent reads \"rouse-bootstrap/1\"";
        for (text, node, reason) in [
            (String::new(), "n1", syntax),
            ("{}".to_owned(), "n1", syntax),
            (good[..good.len() / 2].to_owned(), "n1", syntax),
            (good.replace("\"protocol\": 6", "\"protocol\": 600"), "n1", syntax),
            (good.replace("10.96.0.10:53", "10.96.0.10"), "n1", syntax),
            (good.replace("bootstrap/1", "bootstrap/2"), "n1", format),
            (good.clone(), "n2", "it is of node \"n1\", and this node is \"n2\""),
        ] {
            let refused = BootstrapDocument::parse(&text, node).expect_err(reason).to_string();
            assert_eq!(refused, reason);
        }
        let other_fields = r#"{"format": "rouse-bootstrap/2", "node": "n1", "frontends": 7}"#;
        let refused = BootstrapDocument::parse(other_fields, "n1").expect_err("another version");
        assert!(matches!(refused, BootstrapError::Format { .. }), "{refused}");
    }

    #[test]
    fn what_is_not_known_stays() {
        let mut document = document();
        let before = document.clone();
        document.set_controllers(BTreeSet::new());
        document.set_autoscalers(BTreeSet::new());
        document.set_services(&services(&[], vec![frontend(10, &[])]));
        assert_eq!(document, before, "its servers have stopped");
        document.set_services(&services(&[6], vec![frontend(10, &[7]), frontend(11, &[])]));
        document.set_controllers([at(8)].into());
        let controllers = document.controllers.iter().copied().collect::<Vec<_>>();
        assert_eq!((&document.api_servers, controllers), (&[at(6)].into(), vec![at(8)]));
        assert_eq!(document.frontends, [frontend(10, &[7])]);
        document.set_services(&services(&[6], Vec::new()));
        assert_eq!(document.frontends, [], "the Service is gone, or no longer served");
    }

    #[test]
    fn lists_fill_maps_in_another_boot_only() {
        let mut document = document();
        let lists = [frontend(10, &[2, 3])];
        assert_eq!(document.lists_for_boot(Some("b1")), lists, "an earlier release wrote them");
        document.set_boot(Some("b1"));
        let read = BootstrapDocument::parse(&document.to_text(), "n1").expect("just written");
        assert!(read.lists_for_boot(Some("b1")).is_empty());
        assert_eq!(read.lists_for_boot(Some("b2")), lists);
        assert_eq!(read.lists_for_boot(None), lists, "the boot is not known");
    }

    #[test]
    fn an_empty_list_is_not_read() {
        let mut document = document();
        document.frontends.push(frontend(11, &[]));
        let read = BootstrapDocument::parse(&document.to_text(), "n1").expect("a document");
        assert_eq!(read.frontends, [frontend(10, &[2, 3])]);
    }
}
