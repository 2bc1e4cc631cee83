//! Pure: API servers that an agent may ask, and the order in which it tries them.
//!
//! Servers of the settings come first, then learnt ones: the endpoints of the Service `default/kubernetes`. Each agent
//! has an order of its own, so that the servers share the watches of all nodes.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

/// Accepted forms of a URL, for error messages.
pub const API_SERVER_RULE: &str = "must be https://HOST or https://HOST:PORT, \
     where HOST is an API server's own address or name, and not a name of the Service `kubernetes` \
     (http:// only with a loopback address)";

/// URL of one API server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ApiServerUrl {
    is_https: bool,
    host: ApiServerHost,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ApiServerHost {
    Address(IpAddr),
    Name(String),
}

/// Error of a URL that matches none of the accepted forms.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("API server {text:?}: {API_SERVER_RULE}")]
pub struct ApiServerUrlError {
    text: String,
}

impl FromStr for ApiServerUrl {
    type Err = ApiServerUrlError;

    fn from_str(text: &str) -> Result<Self, ApiServerUrlError> {
        let bad = || ApiServerUrlError { text: text.to_owned() };
        let (is_https, rest) = match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => return Err(bad()),
        };
        let default_port = if is_https { 443 } else { 80 };
        let (host, port) = parse_authority(rest.strip_suffix('/').unwrap_or(rest), default_port)
            .filter(|(_, port)| *port > 0)
            .ok_or_else(bad)?;
        // Without TLS, other hosts on the way could change what the node serves. No other host is on the way of
        // loopback.
        let may_be_plain = matches!(&host, ApiServerHost::Address(ip) if ip.is_loopback());
        if !is_https && !may_be_plain {
            return Err(bad());
        }
        Ok(Self { is_https, host, port })
    }
}

/// Parses a host and an optional port.
fn parse_authority(text: &str, default_port: u16) -> Option<(ApiServerHost, u16)> {
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Some((ApiServerHost::Address(address.ip()), address.port()));
    }
    if let Ok(address) = text.parse::<Ipv4Addr>() {
        return Some((ApiServerHost::Address(address.into()), default_port));
    }
    if let Some(text) = text.strip_prefix('[') {
        let address: Ipv6Addr = text.strip_suffix(']')?.parse().ok()?;
        return Some((ApiServerHost::Address(address.into()), default_port));
    }
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) => (name, port.parse().ok()?),
        None => (text, default_port),
    };
    let labels: Vec<&str> = name.split('.').collect();
    // The ClusterIP would lead through the maps that the answer of the API server fills.
    let is_cluster_ip = matches!(labels.as_slice(), ["kubernetes"] | ["kubernetes", "default", ..]);
    // Four numbers that are no address, for example.
    let is_numeric = labels.last().is_some_and(|it| it.bytes().all(|byte| byte.is_ascii_digit()));
    let is_host = common::wire::is_dns_subdomain(name) && !is_cluster_ip && !is_numeric;
    is_host.then(|| (ApiServerHost::Name(name.to_owned()), port))
}

impl fmt::Display for ApiServerUrl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_https { "https" } else { "http" };
        match &self.host {
            ApiServerHost::Address(ip) => {
                write!(out, "{scheme}://{}", SocketAddr::new(*ip, self.port))
            }
            ApiServerHost::Name(name) => write!(out, "{scheme}://{name}:{}", self.port),
        }
    }
}

impl ApiServerUrl {
    /// Returns the IP address of the host; `None` if it is a name.
    pub fn address(&self) -> Option<IpAddr> {
        match &self.host {
            ApiServerHost::Address(ip) => Some(*ip),
            ApiServerHost::Name(_) => None,
        }
    }
}

/// One API server, by the source that names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ApiServer {
    /// The server of the kubeconfig or of the pod's service account; in a pod, the ClusterIP of `default/kubernetes`.
    Configured,
    /// A server that `--apiserver` or the kubelet's kubeconfig names.
    Given(ApiServerUrl),
    /// An endpoint of `default/kubernetes`.
    Learnt(SocketAddr),
}

impl fmt::Display for ApiServer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Configured => out.write_str("the configured one"),
            Self::Given(url) => url.fmt(out),
            Self::Learnt(address) => address.fmt(out),
        }
    }
}

/// Known API servers, the one in use, and the ones that did not answer last.
#[derive(Debug)]
pub struct ApiServerRotation {
    /// Servers of the settings; never empty.
    given: Vec<ApiServer>,
    learnt: Vec<ApiServer>,
    /// Number of places by which this agent's order differs.
    offset: usize,
    /// Server that is tried first.
    current: ApiServer,
    /// Servers whose last request failed.
    failing: BTreeSet<ApiServer>,
}

impl ApiServerRotation {
    /// Starts with the servers of `--apiserver`; without any, with the configured one. `offset` should differ from agent
    /// to agent.
    pub fn new(given: &[ApiServerUrl], offset: usize) -> Self {
        // A server that is given twice counts once.
        let unique: BTreeSet<&ApiServerUrl> = given.iter().collect();
        let mut given: Vec<_> = unique.into_iter().cloned().map(ApiServer::Given).collect();
        if given.is_empty() {
            given.push(ApiServer::Configured);
        }
        rotate(&mut given, offset);
        let current = given[0].clone();
        Self { given, learnt: Vec::new(), offset, current, failing: BTreeSet::new() }
    }

    /// Replaces the learnt servers by a complete observation. Returns true if they changed. An empty observation is
    /// ignored: a server that stops withdraws its own address, and old addresses are better than none.
    pub fn set_learnt(&mut self, addresses: &BTreeSet<SocketAddr>) -> bool {
        if addresses.is_empty() {
            return false;
        }
        let is_given = |at: &SocketAddr| {
            self.given.iter().any(|it| {
                matches!(it, ApiServer::Given(url)
                    if url.address() == Some(at.ip()) && url.port == at.port())
            })
        };
        let new = addresses.iter().filter(|at| !is_given(at));
        let mut learnt: Vec<_> = new.copied().map(ApiServer::Learnt).collect();
        // Nodes begin with different servers, so that all servers get a share of the nodes.
        rotate(&mut learnt, self.offset);
        if learnt == self.learnt {
            return false;
        }
        self.learnt = learnt;
        let known: BTreeSet<ApiServer> = self.all().cloned().collect();
        self.failing.retain(|it| known.contains(it));
        // The server in use may be one that is no longer listed.
        if !known.contains(&self.current) {
            self.current = self.order_from(0).swap_remove(0);
        }
        true
    }

    /// Returns all servers in the order in which a request tries them: the current one and those after it, and at last
    /// the ones whose last request failed.
    pub fn candidates(&self) -> Vec<ApiServer> {
        self.order_from(0)
    }

    /// Records that a server did not answer. If it is the current one, the next one becomes current. Returns true if its
    /// request before did not fail.
    pub fn record_failure(&mut self, server: &ApiServer) -> bool {
        if !self.all().any(|it| it == server) {
            // No longer known: the request began before that.
            return false;
        }
        let is_new = self.failing.insert(server.clone());
        if self.current == *server {
            self.current = self.order_from(1).swap_remove(0);
        }
        is_new
    }

    /// Records that a server answered. Returns true if its request before failed.
    pub fn record_answer(&mut self, server: &ApiServer) -> bool {
        let has_recovered = self.failing.remove(server);
        if has_recovered && self.failing.contains(&self.current) {
            self.current = server.clone();
        }
        has_recovered
    }

    fn all(&self) -> impl Iterator<Item = &ApiServer> {
        self.given.iter().chain(&self.learnt)
    }

    /// Returns all servers, beginning `skipped` places after the current one; failing ones come last.
    fn order_from(&self, skipped: usize) -> Vec<ApiServer> {
        let mut all: Vec<ApiServer> = self.all().cloned().collect();
        let current = all.iter().position(|it| *it == self.current).unwrap_or_default();
        rotate(&mut all, current + skipped);
        // Stable, so both parts keep their order.
        all.sort_by_key(|it| self.failing.contains(it));
        all
    }
}

/// Rotates a list to the left by any number of places.
fn rotate(all: &mut [ApiServer], places: usize) {
    if let Some(places) = places.checked_rem(all.len()) {
        all.rotate_left(places);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn url(text: &str) -> ApiServerUrl {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    fn given(last: u8) -> ApiServerUrl {
        url(&format!("https://10.0.0.{last}:6443"))
    }

    fn at(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 6443))
    }

    /// Returns the last numbers of the servers' addresses in order; 0 for the configured one.
    fn numbers(servers: &[ApiServer]) -> Vec<u8> {
        let last = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => ip.octets()[3],
            IpAddr::V6(_) => panic!("no test has one"),
        };
        let number = |server: &ApiServer| match server {
            ApiServer::Configured => 0,
            ApiServer::Given(url) => last(url.address().unwrap()),
            ApiServer::Learnt(at) => last(at.ip()),
        };
        servers.iter().map(number).collect()
    }

    #[test]
    fn urls_are_parsed() {
        for (text, shown) in [
            ("https://10.0.0.1", "https://10.0.0.1:443"),
            ("https://10.0.0.1:6443/", "https://10.0.0.1:6443"),
            ("https://[fd00::1]", "https://[fd00::1]:443"),
            ("https://[fd00::1]:6443", "https://[fd00::1]:6443"),
            ("https://api.example.com", "https://api.example.com:443"),
            ("https://kubernetes.example.com:6443", "https://kubernetes.example.com:6443"),
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("http://[::1]", "http://[::1]:80"),
        ] {
            assert_eq!(url(text).to_string(), shown);
        }
        for bad in [
            "",
            "10.0.0.1:6443",
            "https://",
            "https://10.0.0.1:0",
            "https://10.0.0.1:99999",
            "https://10.0.0.300",
            "https://fd00::1",
            "https://[10.0.0.1]",
            "https://api.example.com/path",
            "https://user@api.example.com",
            "https://API_1",
            "http://10.0.0.1:6443",
            "http://localhost:8080",
            "https://kubernetes",
            "https://kubernetes.default.svc:443",
        ] {
            let refused = bad.parse::<ApiServerUrl>().expect_err(bad).to_string();
            assert!(refused.starts_with(&format!("API server {bad:?}: must be https://")));
        }
    }

    #[test]
    fn given_servers_come_before_learnt_ones() {
        let mut rotation = ApiServerRotation::new(&[given(2), given(1), given(2)], 0);
        assert!(rotation.set_learnt(&[at(1), at(3), at(4)].into()));
        assert_eq!(numbers(&rotation.candidates()), [1, 2, 3, 4], "each one once");
        let mut rotation = ApiServerRotation::new(&[], 0);
        assert_eq!(numbers(&rotation.candidates()), [0]);
        rotation.set_learnt(&[at(1), at(2)].into());
        assert_eq!(numbers(&rotation.candidates()), [0, 1, 2]);
    }

    #[test]
    fn agents_begin_with_different_servers() {
        let firsts = (0..6).map(|offset| {
            let mut rotation = ApiServerRotation::new(&[given(1), given(2), given(3)], offset);
            let first = numbers(&rotation.candidates())[0];
            rotation.set_learnt(&[at(4), at(5)].into());
            let learnt = numbers(&rotation.candidates())[3];
            (first, learnt)
        });
        assert_eq!(firsts.collect::<Vec<_>>(), [(1, 4), (2, 5), (3, 4), (1, 5), (2, 4), (3, 5)]);
    }

    #[test]
    fn the_next_server_follows_a_failure_of_the_current_one_only() {
        let mut rotation = ApiServerRotation::new(&[given(1), given(2), given(3)], 0);
        let server = |last| ApiServer::Given(given(last));
        assert!(rotation.record_failure(&server(1)));
        assert!(!rotation.record_failure(&server(1)), "watches of the same server break together");
        assert_eq!(numbers(&rotation.candidates()), [2, 3, 1]);
        assert!(rotation.record_failure(&server(3)));
        assert_eq!(numbers(&rotation.candidates()), [2, 3, 1], "the current one stays");
        assert!(rotation.record_answer(&server(1)));
        assert_eq!(numbers(&rotation.candidates()), [2, 1, 3]);
        assert!(rotation.record_failure(&server(2)));
        assert_eq!(numbers(&rotation.candidates()), [1, 2, 3]);
    }

    #[test]
    fn all_servers_are_tried_in_turn_while_all_fail() {
        let mut rotation = ApiServerRotation::new(&[given(1), given(2), given(3)], 0);
        let mut first = Vec::new();
        for _ in 0..6 {
            let current = rotation.candidates().swap_remove(0);
            rotation.record_failure(&current);
            first.push(current);
        }
        assert_eq!(numbers(&first), [1, 2, 3, 1, 2, 3]);
        rotation.record_answer(&ApiServer::Given(given(3)));
        assert_eq!(numbers(&rotation.candidates())[0], 3, "the first that answers is used");
    }

    #[test]
    fn an_empty_observation_never_empties_the_list() {
        let mut rotation = ApiServerRotation::new(&[], 0);
        rotation.set_learnt(&[at(1), at(2)].into());
        rotation.record_failure(&ApiServer::Configured);
        assert_eq!(numbers(&rotation.candidates()), [1, 2, 0]);
        assert!(!rotation.set_learnt(&BTreeSet::new()));
        assert!(!rotation.set_learnt(&[at(2), at(1)].into()), "the same ones");
        assert_eq!(numbers(&rotation.candidates()), [1, 2, 0]);
        assert!(rotation.set_learnt(&[at(2)].into()));
        assert_eq!(numbers(&rotation.candidates()), [2, 0], "the current one is gone");
        assert!(!rotation.record_failure(&ApiServer::Learnt(at(1))), "no longer known");
        assert_eq!(numbers(&rotation.candidates()), [2, 0]);
    }

    #[derive(Clone, Debug)]
    enum Event {
        Failure(usize),
        Answer(usize),
        Learnt(BTreeSet<u8>),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            (0..8usize).prop_map(Event::Failure),
            (0..8usize).prop_map(Event::Answer),
            proptest::collection::btree_set(1..6u8, 0..4).prop_map(Event::Learnt),
        ]
    }

    proptest! {
        /// After any events each server is tried once, a server that answered last is tried before one that failed
        /// last, and the servers are those of the settings and of the last observation with any.
        #[test]
        fn each_server_is_tried_once_and_working_ones_first(
            count in 0..3u8, offset in 0..9usize, events in proptest::collection::vec(event(), 0..40),
        ) {
            let urls: Vec<_> = (1..=count).map(given).collect();
            let mut rotation = ApiServerRotation::new(&urls, offset);
            let (mut learnt, mut failing) = (BTreeSet::new(), BTreeSet::new());
            for event in events {
                let candidates = rotation.candidates();
                match event {
                    Event::Failure(index) => {
                        let server = &candidates[index % candidates.len()];
                        prop_assert_eq!(rotation.record_failure(server), failing.insert(server.clone()));
                    }
                    Event::Answer(index) => {
                        let server = &candidates[index % candidates.len()];
                        prop_assert_eq!(rotation.record_answer(server), failing.remove(server));
                    }
                    Event::Learnt(numbers) => {
                        rotation.set_learnt(&numbers.iter().copied().map(at).collect());
                        if !numbers.is_empty() {
                            learnt = numbers;
                        }
                        let known: BTreeSet<_> = rotation.candidates().into_iter().collect();
                        failing.retain(|it| known.contains(it));
                    }
                }
                let candidates = rotation.candidates();
                let tried: BTreeSet<u8> = numbers(&candidates).into_iter().collect();
                let own = if count == 0 { 0..=0 } else { 1..=count };
                let known: BTreeSet<u8> = learnt.iter().copied().chain(own).collect();
                prop_assert_eq!((tried.len(), &tried), (candidates.len(), &known));
                let states: Vec<bool> = candidates.iter().map(|it| failing.contains(it)).collect();
                prop_assert!(states.is_sorted(), "{:?} of {:?}", states, candidates);
            }
        }
    }
}
