use serde_json::json;

use super::*;

const SHOP: &str = "shop";

fn name(namespace: &str, name: &str) -> NamespacedName {
    NamespacedName::new(namespace, name)
}

fn policy(spec: Value) -> Value {
    json!({"metadata": {"name": "p"}, "spec": spec})
}

fn client(labels: Value, ip: &str) -> Option<PolicyClientPod> {
    PolicyClientPod::from_pod(&json!({
        "metadata": {"labels": labels},
        "status": {"phase": "Running", "podIPs": [{"ip": ip}]},
    }))
}

fn with_client_pods() -> NetworkPolicies {
    let mut it = NetworkPolicies::default();
    for (namespace, team) in [(SHOP, "shop"), ("bank", "bank"), ("jobs", "bank")] {
        it.set_namespace(namespace, Some(&json!({"metadata": {"labels": {"team": team}}})));
    }
    for (namespace, pod, role, ip) in [
        (SHOP, "web", "web", "10.0.0.1"),
        (SHOP, "job", "job", "10.0.0.2"),
        ("bank", "web", "web", "10.0.0.3"),
        ("jobs", "web", "web", "10.0.0.4"),
    ] {
        it.set_client(name(namespace, pod), client(json!({"role": role}), ip));
    }
    it.set_clients_known();
    it
}

/// Last bytes of the addresses of pods that may connect to a service of `shop` at port 8080; `None`: all may.
fn admitted_clients(policies: &NetworkPolicies) -> Option<Vec<u8>> {
    let labels = || [("app".to_owned(), "hello".to_owned())].into();
    let port = PolicyPort { number: 8080, name: "user-port" };
    let sources = policies.admitted_sources(&SHOP.into(), labels, port)?;
    let may = |last: &u8| sources.contains([10, 0, 0, *last].into());
    Some((1..=9).filter(may).collect())
}

fn under(spec: Value) -> Option<Vec<u8>> {
    let mut it = with_client_pods();
    it.set_policy(name(SHOP, "p"), Some(&policy(spec)));
    admitted_clients(&it)
}

#[test]
fn policies_decide_which_clients_may_wait() {
    let web = json!({"matchLabels": {"role": "web"}});
    let bank = json!({"matchLabels": {"team": "bank"}});
    let cases = [
        ("of other pods", json!({"podSelector": {"matchLabels": {"app": "x"}}}), None),
        ("egress only", json!({"podSelector": {}, "policyTypes": ["Egress"]}), None),
        ("no client", json!({"podSelector": {}}), Some(vec![])),
        ("no ingress", json!({"podSelector": {}, "policyTypes": ["Ingress"]}), Some(vec![])),
        ("all clients", json!({"podSelector": {}, "ingress": [{}]}), None),
        (
            "pods of the policy's namespace",
            json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": web}]}]}),
            Some(vec![1]),
        ),
        (
            "all pods of other namespaces",
            json!({"podSelector": {}, "ingress": [{"from": [{"namespaceSelector": bank}]}]}),
            Some(vec![3, 4]),
        ),
        (
            "such pods of such namespaces",
            json!({"podSelector": {"matchLabels": {"app": "hello"}}, "ingress": [{"from": [
                {"namespaceSelector": {}, "podSelector": {"matchExpressions": [
                    {"key": "role", "operator": "NotIn", "values": ["job"]}]}}]}]}),
            Some(vec![1, 3, 4]),
        ),
        (
            "a network with a hole",
            json!({"podSelector": {}, "ingress": [{"from": [
                {"ipBlock": {"cidr": "10.0.0.0/29", "except": ["10.0.0.2/31"]}}]}]}),
            Some(vec![1, 4, 5, 6, 7]),
        ),
        (
            "either of two rules",
            json!({"podSelector": {}, "ingress": [
                {"from": [{"ipBlock": {"cidr": "10.0.0.9/32"}}]},
                {"from": [{"podSelector": {"matchLabels": {"role": "job"}}}]}]}),
            Some(vec![2, 9]),
        ),
    ];
    for (case, spec, expected) in cases {
        assert_eq!(under(spec), expected, "{case}");
    }
}

#[test]
fn only_rules_for_the_served_port_count() {
    let rule = |ports: Value| json!({"podSelector": {}, "ingress": [{"ports": ports}]});
    let open = [
        json!([{"port": 8080}]),
        json!([{"protocol": "TCP"}]),
        json!([{"port": 8000, "endPort": 8100}]),
        json!([{"port": "user-port"}]),
        json!([{"port": 1}, {"port": 8080, "protocol": "TCP"}]),
    ];
    for ports in open {
        assert_eq!(under(rule(ports.clone())), None, "{ports}");
    }
    let shut = [
        json!([{"port": 8081}]),
        json!([{"port": 8080, "protocol": "UDP"}]),
        json!([{"port": "admin"}]),
        json!([{"port": 70000}]),
    ];
    for ports in shut {
        assert_eq!(under(rule(ports.clone())), Some(vec![]), "{ports}");
    }
}

#[test]
fn policies_of_one_service_add_up() {
    let mut it = with_client_pods();
    let from = |role: &str| {
        let pods = json!({"matchLabels": {"role": role}});
        policy(json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": pods}]}]}))
    };
    it.set_policy(name(SHOP, "a"), Some(&from("web")));
    it.set_policy(name(SHOP, "b"), Some(&from("job")));
    it.set_policy(name("bank", "c"), Some(&policy(json!({"podSelector": {}}))));
    assert_eq!(admitted_clients(&it), Some(vec![1, 2]));
    it.set_policy(name(SHOP, "a"), None);
    assert_eq!(admitted_clients(&it), Some(vec![2]));
    it.set_policy(name(SHOP, "b"), None);
    assert_eq!(admitted_clients(&it), None, "the other namespace's policy does not apply");
}

#[test]
fn a_change_returns_the_namespaces_that_it_may_affect() {
    let mut it = with_client_pods();
    let none = BTreeSet::<SmolStr>::new();
    let shop: BTreeSet<SmolStr> = [SHOP.into()].into();
    assert!(!it.needs_client_pods());
    let spec = json!({"podSelector": {}, "ingress": [{"from": [
        {"namespaceSelector": {"matchLabels": {"team": "bank"}}}]}]});
    assert_eq!(it.set_policy(name(SHOP, "p"), Some(&policy(spec))), shop);
    assert!(it.needs_client_pods());

    let web = || client(json!({"role": "web"}), "10.0.0.7");
    assert_eq!(it.set_client(name("bank", "new"), web()), shop);
    assert_eq!(it.set_client(name("bank", "new"), web()), none, "nothing changed");
    assert_eq!(it.set_client(name(SHOP, "new"), web()), none, "no policy lets it in");
    assert_eq!(it.set_client(name("bank", "new"), None), shop);

    let labels = |team: &str| json!({"metadata": {"labels": {"team": team}}});
    assert_eq!(it.set_namespace("jobs", Some(&labels("bank"))), none);
    assert_eq!(it.set_namespace("jobs", Some(&labels("shop"))), shop);
    assert_eq!(admitted_clients(&it), Some(vec![3]));
    // Namespaces and pods come from two watches: a pod may be known before its namespace.
    it.set_client(name("late", "web"), client(json!({}), "10.0.0.8"));
    assert_eq!(it.set_namespace("late", Some(&labels("bank"))), shop);
    assert_eq!(admitted_clients(&it), Some(vec![3, 8]));
}

#[test]
fn a_policy_that_names_pods_waits_until_all_pods_are_known() {
    let mut it = NetworkPolicies::default();
    let (none, shop) = (BTreeSet::<SmolStr>::new(), BTreeSet::<SmolStr>::from([SHOP.into()]));
    let from_pods = json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": {}}]}]});
    let (from_pods, deny) = (policy(from_pods), policy(json!({"podSelector": {}})));
    assert_eq!(it.set_policy(name(SHOP, "p"), Some(&from_pods)), none);
    assert!(it.needs_client_pods());
    assert_eq!(admitted_clients(&it), None, "as before the policy");
    assert_eq!(it.set_policy(name(SHOP, "p"), Some(&deny)), shop);
    assert!(!it.needs_client_pods());
    assert_eq!(admitted_clients(&it), Some(vec![]), "no pod has to be known for this");
    assert_eq!(it.set_policy(name(SHOP, "p"), Some(&from_pods)), none);
    assert_eq!(admitted_clients(&it), Some(vec![]), "its earlier state");
    it.set_policy(name(SHOP, "q"), Some(&from_pods));
    it.set_policy(name(SHOP, "q"), None);
    let pod = client(json!({}), "10.0.0.1");
    assert_eq!(it.set_client(name(SHOP, "web"), pod), none, "one of many");
    assert_eq!(it.set_clients_known(), shop);
    assert_eq!(admitted_clients(&it), Some(vec![1]));
    assert_eq!(it.set_clients_known(), none);
    assert_eq!(it.set_policy(name(SHOP, "p"), None), shop);
    assert_eq!(admitted_clients(&it), None, "the other one was deleted before it was in force");
}

#[test]
fn a_pod_without_an_address_of_its_own_is_no_client() {
    let pod = |spec: Value, status: Value| {
        PolicyClientPod::from_pod(&json!({"metadata": {}, "spec": spec, "status": status}))
            .is_some()
    };
    let status = json!({"phase": "Running", "podIPs": [{"ip": "10.0.0.1"}]});
    assert!(pod(json!({}), status.clone()));
    assert!(!pod(json!({"hostNetwork": true}), status));
    assert!(!pod(json!({}), json!({"phase": "Pending"})));
    let ended = json!({"phase": "Succeeded", "podIPs": [{"ip": "10.0.0.1"}]});
    assert!(!pod(json!({}), ended));
}

#[test]
fn unreadable_rules_admit_no_client() {
    let unreadable = json!({"podSelector": {}, "ingress": [{"from": [
        {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Likes", "values": ["b"]}]}},
        {"ipBlock": {"cidr": "everything"}}]}]});
    assert_eq!(under(unreadable), Some(vec![]));
}

#[test]
fn an_unreadable_policy_admits_no_client() {
    let selector = json!({"matchExpressions": [{"key": "app", "operator": "Likes"}]});
    for spec in [
        Value::Null,
        json!("all"),
        // Its rules may be meant for other pods than these.
        json!({"podSelector": selector, "ingress": [{}]}),
        json!({"podSelector": "all", "policyTypes": "Ingress"}),
        json!({"podSelector": {}, "ingress": {"from": []}}),
        json!({"podSelector": {}, "ingress": [{"from": "all"}, "all", null]}),
        json!({"podSelector": {}, "ingress": [{"from": [{}]}]}),
        json!({"podSelector": {}, "ingress": [{"from": [{"newSelector": {}}]}]}),
        json!({"podSelector": {}, "policyTypes": ["Ingress"], "egress": "none"}),
    ] {
        assert_eq!(under(spec.clone()), Some(vec![]), "{spec}");
    }
    // Parts of other traffic are not read, so they cannot be unreadable.
    assert_eq!(under(json!({"podSelector": [], "policyTypes": ["Egress"]})), None);
    let web = json!({"from": [{"podSelector": {"matchLabels": {"role": "web"}}}]});
    let rules = json!({"podSelector": {}, "ingress": [{"ports": 1}, web], "egress": "none"});
    assert_eq!(under(rules), Some(vec![1]), "the other rules hold");
}
