//! Pure: Kubernetes objects that the bench serves to every service proxy: Services, their EndpointSlices, one node.

use std::net::{Ipv4Addr, SocketAddr};

use serde_json::{Value, json};

use crate::measure::service_connects::SERVICE_PORT;

/// Name of the node on which each proxy runs.
pub(super) const NODE: &str = "node1";
/// Namespace of all Services.
const NAMESPACE: &str = "bench";
/// Name of each Service's only port.
const PORT_NAME: &str = "main";
/// Address of the first Service; the others follow.
const FIRST_CLUSTER_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 1, 0);
/// Network of the ClusterIPs, as the API server's object ServiceCIDR has it.
const SERVICE_NETWORK: &str = "10.96.0.0/12";
/// Network of all pods: clients and endpoints.
pub(super) const POD_NETWORK: &str = "10.128.0.0/9";
/// Network of the endpoints.
pub(super) const ENDPOINT_NETWORK: &str = "10.192.0.0/10";
/// Address of the first endpoint; the others follow.
const FIRST_ENDPOINT: Ipv4Addr = Ipv4Addr::new(10, 193, 0, 0);
/// Backends between which the Service [`SWITCHED_SERVICE`] switches.
pub(super) const SWITCHED_BACKENDS: [Ipv4Addr; 2] =
    [Ipv4Addr::new(10, 192, 0, 1), Ipv4Addr::new(10, 192, 0, 2)];
/// Number of the Service that switches between [`SWITCHED_BACKENDS`].
pub(super) const SWITCHED_SERVICE: u32 = 0;
/// Port of [`SWITCHED_BACKENDS`]. A listener of one address cannot share a port with a listener of all.
pub(super) const SWITCHED_PORT: u16 = 8081;
/// Port of all other endpoints.
pub(super) const ENDPOINT_PORT: u16 = 8080;
/// Distance between the two addresses that a changing endpoint has in turn: more than there are endpoints.
const CHANGE_DISTANCE: u32 = 1_000_000;

/// Services of one measurement, each with as many endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServiceSet {
    pub(super) services: u32,
    pub(super) endpoints_each: u32,
    /// True if [`SWITCHED_SERVICE`] has one of [`SWITCHED_BACKENDS`] instead of its own endpoints. Only for TCP.
    pub(super) switches: bool,
    /// Protocol of the only port of each Service.
    pub(super) protocol: ServiceProtocol,
}

/// Transport protocol of a Service's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServiceProtocol {
    Tcp,
    Udp,
}

impl ServiceProtocol {
    /// Name in objects of Kubernetes.
    const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        }
    }
}

impl ServiceSet {
    /// Returns all Services, as the API server stores them.
    pub(super) fn service_objects(self) -> impl Iterator<Item = Value> {
        (0..self.services).map(move |number| service(number, self.protocol))
    }

    /// Returns the EndpointSlices of all Services.
    pub(super) fn endpoint_slices(self) -> impl Iterator<Item = Value> {
        (0..self.services).map(move |number| match self.is_switched(number) {
            true => switched_slice(SWITCHED_BACKENDS[0]),
            false => self.slice(number, &self.endpoint_addresses(number, None)),
        })
    }

    /// Returns the EndpointSlice that the change number `change` produces: the Services change in turn, one endpoint
    /// each time.
    pub(super) fn changed_slice(self, change: u32) -> Value {
        let (service, pass) = (change % self.services, change / self.services);
        let addresses = self.endpoint_addresses(service, Some(pass));
        self.slice(service, &addresses)
    }

    fn slice(self, service: u32, addresses: &[Ipv4Addr]) -> Value {
        endpoint_slice(service, addresses, ENDPOINT_PORT, self.protocol)
    }

    /// Returns the first endpoint of a Service, before any change.
    pub(super) fn endpoint(self, service: u32) -> SocketAddr {
        match self.is_switched(service) {
            true => (SWITCHED_BACKENDS[0], SWITCHED_PORT).into(),
            false => (endpoint_address(service * self.endpoints_each), ENDPOINT_PORT).into(),
        }
    }

    fn is_switched(self, service: u32) -> bool {
        self.switches && service == SWITCHED_SERVICE
    }

    /// Addresses of a Service's endpoints after `last_pass`. In pass p the endpoint p modulo their number changes its
    /// address.
    fn endpoint_addresses(self, service: u32, last_pass: Option<u32>) -> Vec<Ipv4Addr> {
        let address = |position: u32| {
            let changes = match last_pass {
                Some(pass) if pass >= position => (pass - position) / self.endpoints_each + 1,
                _ => 0,
            };
            let number = service * self.endpoints_each + position;
            endpoint_address(number + changes % 2 * CHANGE_DISTANCE)
        };
        (0..self.endpoints_each).map(address).collect()
    }
}

/// Returns the ClusterIP of a Service.
pub(super) fn cluster_ip(service: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(FIRST_CLUSTER_IP) + service)
}

fn endpoint_address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(FIRST_ENDPOINT) + number)
}

/// Returns the EndpointSlice of [`SWITCHED_SERVICE`] with this backend alone.
pub(super) fn switched_slice(backend: Ipv4Addr) -> Value {
    endpoint_slice(SWITCHED_SERVICE, &[backend], SWITCHED_PORT, ServiceProtocol::Tcp)
}

/// Returns the node, its namespace and the network of the Services.
pub(super) fn node_objects(address: Ipv4Addr) -> [Value; 3] {
    let labels = json!({"kubernetes.io/hostname": NODE, "topology.kubernetes.io/zone": "a"});
    [
        json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": labels},
            "spec": {"podCIDRs": [POD_NETWORK]},
            "status": {"addresses": [{"type": "InternalIP", "address": address}]},
        }),
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
        json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
            "metadata": {"name": "kubernetes"}, "spec": {"cidrs": [SERVICE_NETWORK]},
        }),
    ]
}

fn service_name(service: u32) -> String {
    format!("service-{service:05}")
}

fn service(number: u32, protocol: ServiceProtocol) -> Value {
    let (name, address) = (service_name(number), cluster_ip(number));
    let uid = format!("service-uid-{number:05}");
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": uid},
        "spec": {
            "type": "ClusterIP", "clusterIP": address, "clusterIPs": [address],
            "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
            "internalTrafficPolicy": "Cluster", "sessionAffinity": "None",
            "selector": {"app": name},
            "ports": [{
                "name": PORT_NAME, "protocol": protocol.name(), "port": SERVICE_PORT,
                "targetPort": PORT_NAME,
            }],
        },
    })
}

/// Returns the slice of a Service, as Kubernetes' own controller writes it.
fn endpoint_slice(
    service: u32,
    addresses: &[Ipv4Addr],
    port: u16,
    protocol: ServiceProtocol,
) -> Value {
    let name = service_name(service);
    let endpoint = |address: &Ipv4Addr| {
        let pod = format!("{name}-{address}");
        json!({
            "addresses": [address],
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "nodeName": NODE, "zone": "a",
            "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": pod},
        })
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": format!("{name}-abcde"), "namespace": NAMESPACE,
            "uid": format!("slice-uid-{service:05}"),
            "labels": {
                "kubernetes.io/service-name": name,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            },
        },
        "ports": [{"name": PORT_NAME, "port": port, "protocol": protocol.name()}],
        "endpoints": addresses.iter().map(endpoint).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn addresses(slice: &Value) -> Vec<String> {
        let endpoints = slice["endpoints"].as_array().unwrap().iter();
        endpoints.map(|it| it["addresses"][0].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn all_services_and_endpoints_have_addresses_of_their_own_in_their_networks() {
        let set = ServiceSet {
            services: 10_000,
            endpoints_each: 10,
            switches: false,
            protocol: ServiceProtocol::Tcp,
        };
        let slices = set.endpoint_slices();
        let endpoints: BTreeSet<String> = slices.flat_map(|slice| addresses(&slice)).collect();
        assert_eq!(endpoints.len(), 100_000);
        let first_octets = |address: &str| -> (u8, u8) {
            let octets = address.parse::<Ipv4Addr>().unwrap().octets();
            (octets[0], octets[1])
        };
        let is_in_network = |it: &String| first_octets(it).0 == 10 && first_octets(it).1 >= 192;
        assert!(endpoints.iter().all(is_in_network));
        let services: BTreeSet<String> = set
            .service_objects()
            .map(|service| service["spec"]["clusterIP"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(services.len(), 10_000);
        assert!(services.iter().all(|it| matches!(first_octets(it), (10, 96..112))));
    }

    #[test]
    fn each_change_moves_one_endpoint_of_one_service() {
        let set = ServiceSet {
            services: 3,
            endpoints_each: 2,
            switches: false,
            protocol: ServiceProtocol::Tcp,
        };
        let mut present: Vec<Vec<String>> =
            set.endpoint_slices().map(|slice| addresses(&slice)).collect();
        let mut all = BTreeSet::new();
        for change in 0..30 {
            let service = change as usize % 3;
            let changed = addresses(&set.changed_slice(change));
            let moved = present[service].iter().zip(&changed).filter(|(old, new)| old != new);
            assert_eq!(moved.count(), 1, "change {change}");
            all.extend(changed.iter().cloned());
            present[service] = changed;
        }
        assert_eq!(all.len(), 12, "each endpoint has two addresses");
    }

    #[test]
    fn the_switched_service_begins_with_its_first_backend() {
        let set = ServiceSet {
            services: 2,
            endpoints_each: 1,
            switches: true,
            protocol: ServiceProtocol::Tcp,
        };
        let slices: Vec<Value> = set.endpoint_slices().collect();
        assert_eq!(addresses(&slices[0]), [SWITCHED_BACKENDS[0].to_string()]);
        assert_eq!(slices[0]["ports"][0]["port"], SWITCHED_PORT);
        assert_eq!(slices[1]["ports"][0]["port"], ENDPOINT_PORT);
        assert_eq!(slices[0], switched_slice(SWITCHED_BACKENDS[0]));
    }

    #[test]
    fn services_and_their_slices_have_the_same_port_of_the_same_protocol() {
        let protocol = ServiceProtocol::Udp;
        let set = ServiceSet { services: 1, endpoints_each: 1, switches: false, protocol };
        let (service, slice) =
            (set.service_objects().next().unwrap(), set.endpoint_slices().next().unwrap());
        let (service, slice) = (&service["spec"]["ports"][0], &slice["ports"][0]);
        assert_eq!((&service["protocol"], &service["name"]), (&slice["protocol"], &slice["name"]));
        assert_eq!(service["protocol"], "UDP");
        assert_eq!(set.changed_slice(0)["ports"][0], *slice);
    }
}
