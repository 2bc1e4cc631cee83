//! Random Services and EndpointSlices, as the API server accepts them.

use serde_json::{Value, json};

/// Families of the EndpointSlices of each Service.
const SLICES: [&str; 3] = ["IPv4", "IPv4", "IPv6"];
/// Names of the ports of a Service.
const PORT_NAMES: [&str; 3] = ["web", "admin", "metrics"];

/// Source of random objects (xorshift64*): the same seed gives the same objects.
pub(super) struct RandomObjects(u64);

impl RandomObjects {
    /// Makes the source of a batch.
    pub(super) fn of_batch(batch: u64) -> Self {
        // The seed must not be 0.
        Self((batch + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % end
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// Returns a Service without a selector, so that its EndpointSlices are those of the test.
    pub(super) fn service(&mut self, name: &str) -> Value {
        let all_families: [&[&str]; 4] =
            [&["IPv4"], &["IPv6"], &["IPv4", "IPv6"], &["IPv6", "IPv4"]];
        let families = self.one_of(&all_families);
        let family_policy = ["SingleStack", "RequireDualStack"][families.len() - 1];
        let mut ports = Vec::new();
        let port_count = 1 + self.below(PORT_NAMES.len());
        for (name, number) in PORT_NAMES[..port_count].iter().zip(80u16..) {
            let protocol = self.one_of(&["TCP", "TCP", "UDP"]);
            ports.push(json!({"name": name, "protocol": protocol, "port": number}));
        }
        // The only port of a Service may have no name.
        if ports.len() == 1 && self.one_in(2) {
            ports[0]["name"] = "".into();
        }
        let mut service = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {
                "type": self.one_of(&["ClusterIP", "ClusterIP", "NodePort", "LoadBalancer"]),
                "ipFamilies": families, "ipFamilyPolicy": family_policy,
                "internalTrafficPolicy": self.one_of(&["Cluster", "Cluster", "Local"]),
                "publishNotReadyAddresses": self.one_in(4), "ports": ports,
            },
        });
        if self.one_in(4) {
            service["spec"]["sessionAffinity"] = "ClientIP".into();
            let timeout = json!({"clientIP": {"timeoutSeconds": 1 + self.below(86_400)}});
            service["spec"]["sessionAffinityConfig"] = timeout;
        }
        if self.one_in(10) {
            let labels = json!({"service.kubernetes.io/service-proxy-name": "another"});
            service["metadata"]["labels"] = labels;
        }
        service
    }

    /// Returns new content for each EndpointSlice of a Service. `number` is that of the Service: no two share an
    /// address.
    pub(super) fn slices(&mut self, service: &Value, number: u8) -> Vec<Value> {
        // All endpoints have hints or none, or else hints would nearly never count.
        let (are_zones_hinted, are_nodes_hinted) = (self.one_in(2), self.one_in(3));
        let are_all_unready = self.one_in(4);
        let mut slices = Vec::new();
        for (index, family) in (0u8..).zip(SLICES) {
            let ports = self.slice_ports(service);
            let mut endpoints = Vec::new();
            for last in 1..=6u8 {
                // An endpoint may come or go with the next content.
                if self.one_in(2) {
                    continue;
                }
                let address = match family {
                    "IPv4" => format!("10.77.{number}.{}", index * 10 + last),
                    // Without a 0, whose address would not be in its shortest form.
                    _ => format!("fd00:77::{:x}:{last:x}", number + 1),
                };
                let mut endpoint = self.endpoint(&address, are_all_unready);
                if are_zones_hinted && !self.one_in(30) {
                    endpoint["hints"]["forZones"] = self.hints(&["a", "b", "c"]);
                }
                if are_nodes_hinted && !self.one_in(30) {
                    endpoint["hints"]["forNodes"] = self.hints(&["node1", "node2", "node3"]);
                }
                endpoints.push(endpoint);
            }
            slices.push(slice(service, index, family, &ports, &endpoints));
        }
        slices
    }

    /// Returns ports for an EndpointSlice: most ports of the Service, and sometimes one of another name.
    fn slice_ports(&mut self, service: &Value) -> Vec<Value> {
        let mut ports = Vec::new();
        for port in service["spec"]["ports"].as_array().into_iter().flatten() {
            if self.one_in(6) {
                continue;
            }
            let mut protocol = port["protocol"].clone();
            if self.one_in(10) {
                protocol = "UDP".into();
            }
            let number = 8080 + self.below(2);
            ports.push(json!({"name": port["name"], "protocol": protocol, "port": number}));
        }
        if self.one_in(4) {
            ports.push(json!({"name": "another", "protocol": "TCP", "port": 8080}));
        }
        ports
    }

    fn endpoint(&mut self, address: &str, is_unready: bool) -> Value {
        let mut endpoint = json!({"addresses": [address], "conditions": {}});
        for condition in ["ready", "serving", "terminating"] {
            if !self.one_in(5) {
                endpoint["conditions"][condition] = self.one_in(2).into();
            }
        }
        if is_unready {
            endpoint["conditions"]["ready"] = false.into();
        }
        let node = self.one_of(&["node1", "node2", "node3", ""]);
        if !node.is_empty() {
            endpoint["nodeName"] = node.into();
        }
        endpoint
    }

    /// Returns one or two hints, each for another name.
    fn hints(&mut self, names: &[&str; 3]) -> Value {
        let first = self.below(3);
        let chosen = (first..=first + self.below(2)).map(|at| json!({"name": names[at % 3]}));
        chosen.collect::<Vec<_>>().into()
    }
}

/// Returns an EndpointSlice of a Service.
pub(super) fn slice(
    service: &Value,
    index: u8,
    family: &str,
    ports: &[Value],
    endpoints: &[Value],
) -> Value {
    let name = service["metadata"]["name"].as_str().expect("it has a name");
    let labels = json!({
        "kubernetes.io/service-name": name, "endpointslice.kubernetes.io/managed-by": "tests",
    });
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family,
        "metadata": {"name": format!("{name}-{index}"), "labels": labels},
        "ports": ports, "endpoints": endpoints,
    })
}
