//! Random Services and EndpointSlices on a real API server: agents lead connects to the same endpoints as the rules of
//! the kube-proxy that runs beside them.

mod random_objects;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use agent::service_facts::{TraceFacts, TraceOutcome, TraceTarget};
use serde_json::{Value, json};
use tests::installed_cluster::RouseCluster;
use tests::test_cluster::WAIT_TIMEOUT;
use tests::wait::sleep;

use self::random_objects::{RandomObjects, slice};
use crate::clusterip::ServingCluster;
use crate::zoned_nodes::{NODE_ZONES, ZonedNodes};

/// Services that exist at a time.
const BATCH: u8 = 50;
/// Page of an agent that has the choice for a connect, on its node.
const TRACE_PAGE: &str = "http://127.0.0.1:7104/debug/trace";

/// Treatment of connects to one frontend.
#[derive(Debug, PartialEq, Eq)]
enum ComparedTreatment {
    /// Sent to one of these endpoints. A client keeps its endpoint for this time; 0: it does not.
    Endpoints(BTreeSet<SocketAddr>, u32),
    /// Refused, or with kube-proxy dropped where a Local policy finds no endpoint on the node.
    NoEndpoints,
    /// Left as the client made them.
    NotServed,
}

impl ComparedTreatment {
    /// Returns the treatment that an agent tells.
    fn of_trace(trace: &TraceFacts) -> Self {
        match trace.outcome {
            TraceOutcome::Endpoint => {
                let listed = trace.candidates.iter().filter(|it| it.is_listed);
                let affinity = trace.frontend.as_ref().map_or(0, |it| it.affinity_seconds);
                Self::Endpoints(listed.map(|it| it.address).collect(), affinity)
            }
            TraceOutcome::Refused => Self::NoEndpoints,
            TraceOutcome::Unchanged => Self::NotServed,
            TraceOutcome::Activator => panic!("only Rouse's services have activators"),
        }
    }
}

/// Rules of kube-proxy in mode iptables on one node, for both families.
#[derive(Default)]
struct KubeProxyRules {
    v4: FamilyRules,
    v6: FamilyRules,
}

/// Rules for one family. A Service of both families has chains of the same names in each.
#[derive(Default)]
struct FamilyRules {
    /// Chain of each address, port and protocol, or the target that rejects or drops.
    targets: BTreeMap<(SocketAddr, u8), String>,
    /// Chains of endpoints and seconds of affinity, by the chain of the Service.
    services: BTreeMap<String, (BTreeSet<String>, u32)>,
    /// Endpoints by their chains.
    endpoints: BTreeMap<String, SocketAddr>,
}

impl KubeProxyRules {
    fn read(rouse: &RouseCluster, node: &str) -> Result<Self, String> {
        let mut rules = Self::default();
        for (program, family) in
            [("iptables-save", &mut rules.v4), ("ip6tables-save", &mut rules.v6)]
        {
            let text = rouse.cluster.on_node(node, &[program])?;
            text.lines().for_each(|line| family.add(line));
        }
        Ok(rules)
    }

    fn treatment(&self, frontend: &TraceTarget) -> ComparedTreatment {
        let family = if frontend.to.is_ipv4() { &self.v4 } else { &self.v6 };
        family.treatment(frontend)
    }
}

impl FamilyRules {
    /// Adds a line of `iptables-save`. Lines that say nothing about ClusterIPs are ignored.
    fn add(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let value = |flag: &str| {
            let at = words.iter().position(|word| *word == flag)?;
            words.get(at + 1).copied()
        };
        let (Some(chain), Some(target)) = (value("-A"), value("-j")) else { return };
        if chain == "KUBE-SERVICES" {
            let address = value("-d").and_then(|it| it.split('/').next()?.parse::<IpAddr>().ok());
            let port = value("--dport").and_then(|it| it.parse::<u16>().ok());
            let protocol = match value("-p") {
                Some("tcp") => 6,
                Some("udp") => 17,
                _ => return,
            };
            let is_of_service =
                target.starts_with("KUBE-SV") || ["REJECT", "DROP"].contains(&target);
            if let (Some(address), Some(port), true) = (address, port, is_of_service) {
                let frontend = (SocketAddr::new(address, port), protocol);
                self.targets.insert(frontend, target.to_owned());
            }
        } else if chain.starts_with("KUBE-SV") && target.starts_with("KUBE-SEP-") {
            let (endpoints, affinity) = self.services.entry(chain.to_owned()).or_default();
            endpoints.insert(target.to_owned());
            *affinity = value("--seconds").and_then(|it| it.parse().ok()).unwrap_or(*affinity);
        } else if let Some(Ok(to)) = value("--to-destination").map(str::parse::<SocketAddr>) {
            self.endpoints.insert(chain.to_owned(), to);
        }
    }

    fn treatment(&self, frontend: &TraceTarget) -> ComparedTreatment {
        let target = self.targets.get(&(frontend.to, frontend.protocol));
        match target.map(String::as_str) {
            None => ComparedTreatment::NotServed,
            Some("REJECT" | "DROP") => ComparedTreatment::NoEndpoints,
            Some(chain) => {
                let (chains, affinity) = self.services.get(chain).cloned().unwrap_or_default();
                let endpoints = chains.iter().filter_map(|it| self.endpoints.get(it).copied());
                ComparedTreatment::Endpoints(endpoints.collect(), affinity)
            }
        }
    }
}

/// Returns the choice of a node's agent for each frontend.
fn read_traces(
    rouse: &RouseCluster,
    node: &str,
    frontends: &[TraceTarget],
) -> Result<Vec<TraceFacts>, String> {
    let urls: Vec<String> = frontends.iter().map(|it| format!("{TRACE_PAGE}?{it}")).collect();
    let mut command = vec!["curl", "--silent", "--show-error", "--noproxy", "*"];
    command.extend(urls.iter().map(String::as_str));
    let text = rouse.cluster.on_node(node, &command)?;
    let traces = serde_json::Deserializer::from_str(&text).into_iter::<TraceFacts>();
    let traces = traces.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
    match traces.len() == frontends.len() {
        true => Ok(traces),
        false => Err(format!("{} traces of {} frontends", traces.len(), frontends.len())),
    }
}

/// Returns the treatment of each frontend on a node, or the first difference between agent and kube-proxy. Until both
/// have the endpoint `newest`, they may agree on what they knew before.
fn compare(
    rouse: &RouseCluster,
    node: &str,
    frontends: &[TraceTarget],
    newest: SocketAddr,
) -> Result<Vec<ComparedTreatment>, String> {
    let rules = KubeProxyRules::read(rouse, node)?;
    let mut treatments = Vec::new();
    for (frontend, trace) in frontends.iter().zip(read_traces(rouse, node, frontends)?) {
        let (expected, actual) = (rules.treatment(frontend), ComparedTreatment::of_trace(&trace));
        if expected != actual {
            let reason = trace.reason;
            return Err(format!(
                "{frontend}: kube-proxy has {expected:?}, the agent {actual:?}: {reason}"
            ));
        }
        treatments.push(actual);
    }
    let is_newest = |it: &ComparedTreatment| match it {
        ComparedTreatment::Endpoints(endpoints, _) => endpoints.contains(&newest),
        ComparedTreatment::NoEndpoints | ComparedTreatment::NotServed => false,
    };
    match treatments.iter().any(is_newest) {
        true => Ok(treatments),
        false => Err(format!("{newest} is not known yet")),
    }
}

/// Waits until agent and kube-proxy agree on each node, and returns the treatments.
fn wait_for_agreement(
    rouse: &RouseCluster,
    frontends: &[TraceTarget],
    newest: SocketAddr,
) -> Vec<ComparedTreatment> {
    let mut treatments = Vec::new();
    for (node, _) in NODE_ZONES {
        let started = Instant::now();
        loop {
            match compare(rouse, node, frontends, newest) {
                Ok(agreed) => {
                    treatments.extend(agreed);
                    break;
                }
                Err(difference) => {
                    assert!(started.elapsed() < WAIT_TIMEOUT, "{node}: {difference}");
                    sleep(Duration::from_secs(1));
                }
            }
        }
    }
    treatments
}

/// Returns each address, port and protocol of the Services in a namespace.
fn frontends(rouse: &RouseCluster, namespace: &str) -> Vec<TraceTarget> {
    let list = rouse.cluster.get(&["service", "--namespace", namespace]);
    let mut frontends = Vec::new();
    for service in list["items"].as_array().into_iter().flatten() {
        let spec = &service["spec"];
        for address in spec["clusterIPs"].as_array().into_iter().flatten() {
            let address: IpAddr = address.as_str().and_then(|it| it.parse().ok()).expect("an IP");
            for port in spec["ports"].as_array().into_iter().flatten() {
                let number = port["port"].as_u64().and_then(|it| u16::try_from(it).ok());
                let to = SocketAddr::new(address, number.expect("a port"));
                let protocol = if port["protocol"] == "UDP" { 17 } else { 6 };
                frontends.push(TraceTarget { to, protocol });
            }
        }
    }
    frontends
}

/// Returns the Service and the EndpointSlice that are written last of all, so that what knows them knows the others.
fn last_objects(batch: u64, newest: SocketAddr) -> [Value; 2] {
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": format!("b{batch}last")},
        "spec": {"ports": [{"port": 80}]},
    });
    let endpoint = json!({"addresses": [newest.ip().to_string()]});
    let port = json!({"name": "", "port": newest.port()});
    let slice = slice(&service, 0, "IPv4", &[port], &[endpoint]);
    [service, slice]
}

/// Compares a batch of Services, with two contents of its EndpointSlices. Returns the treatments on all nodes.
fn compare_batch(rouse: &RouseCluster, namespace: &str, batch: u64) -> Vec<ComparedTreatment> {
    let mut random = RandomObjects::of_batch(batch);
    let new_service = |number: u8| random.service(&format!("b{batch}s{number}"));
    let services: Vec<Value> = (0..BATCH).map(new_service).collect();
    let mut treatments = Vec::new();
    for (round, action) in (1u8..).zip(["create", "replace"]) {
        let newest = SocketAddr::from(([10, 78, 0, round], 8080));
        let [last_service, last_slice] = last_objects(batch, newest);
        let mut objects = Vec::new();
        if action == "create" {
            objects.extend(services.iter().cloned());
            objects.push(last_service);
        }
        for (number, service) in (0u8..).zip(&services) {
            objects.extend(random.slices(service, number));
        }
        objects.push(last_slice);
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
        let args = [action, "--namespace", namespace];
        rouse.cluster.kubectl_with_manifest(&args, &list).expect("they are valid");
        let frontends = frontends(rouse, namespace);
        treatments.extend(wait_for_agreement(rouse, &frontends, newest));
    }
    let delete = ["delete", "services,endpointslices", "--all", "--namespace", namespace];
    rouse.cluster.kubectl(&delete).expect("an operator may");
    treatments
}

fn compare_batches(batches: u64) {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("comparison");
    let name = namespace.name.as_str();
    let _zones = ZonedNodes::label(&rouse);
    let label = ["label", "namespace", name, "rouse.dev/clusterip=true"];
    rouse.cluster.kubectl(&label).expect("an operator may");
    let _labelled = ServingCluster::install(&rouse, "labelled");
    let mut counts = [0; 3];
    for treatment in (0..batches).flat_map(|batch| compare_batch(&rouse, name, batch)) {
        counts[match treatment {
            ComparedTreatment::Endpoints(..) => 0,
            ComparedTreatment::NoEndpoints => 1,
            ComparedTreatment::NotServed => 2,
        }] += 1;
    }
    // All three occur, or the comparison would prove little.
    assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
}

#[test]
fn fifty_random_services_have_the_endpoints_of_kube_proxy_on_each_node() {
    compare_batches(1);
}

#[test]
#[ignore = "takes minutes: --long"]
fn a_thousand_random_services_have_the_endpoints_of_kube_proxy_on_each_node() {
    compare_batches(20);
}
