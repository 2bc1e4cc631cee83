//! Properties that all objects of an installation share.

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU16,
};

use agent::config::ClusterIpMode;
use clap::{Parser as _, ValueEnum as _};
use common::request_log;
use controller::{
    model::{
        cluster_state::{ControllerSettings, name_registry::PORT_RECORD_NAME},
        config_maps::{
            Configs, NetworkConfig, RevisionDefaults,
            go_template::GoTemplate,
            network::{DOMAIN_TEMPLATE, TAG_TEMPLATE},
            port_ranges::is_reserved_gateway_port,
        },
        object::ResourceKind,
    },
    shell::api::watch_scope::{
        cert_manager_scopes, gateway_scopes, grpc_route_scopes, ingress_scopes, request_scopes,
        watch_scopes, workload_scopes,
    },
};
use k8s_openapi::serde::{Serialize, de::DeserializeOwned};
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        autoscaling::v2::HorizontalPodAutoscaler,
        core::v1::{ConfigMap, Namespace, Service, ServiceAccount},
        flowcontrol::v1::FlowSchema,
        networking::v1::NetworkPolicy,
        policy::v1::PodDisruptionBudget,
        rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use serde_json::Value;

use super::{
    configs, kube_proxy_check, objects, rbac,
    settings::{GatewayExposure, InstallProfile, InstallSettings, NAMESPACE},
    workloads,
};

fn all() -> Vec<Value> {
    objects::all(&InstallSettings::default())
}

fn objects_of_kind(kind: &str) -> Vec<Value> {
    all().into_iter().filter(|it| it["kind"] == kind).collect()
}

/// Returns all containers of a workload, with its init containers.
fn containers(workload: &Value) -> Vec<&Value> {
    let pod = &workload["spec"]["template"]["spec"];
    let fields = ["initContainers", "containers"];
    fields.into_iter().filter_map(|field| pod[field].as_array()).flatten().collect()
}

/// Returns the settings that the example of a ConfigMap shows.
fn example_of(map: &Value) -> BTreeMap<String, String> {
    // An example of comments only is an empty document, and no map.
    let example: Option<BTreeMap<String, String>> =
        serde_norway::from_str(map["data"]["_example"].as_str().unwrap())
            .unwrap_or_else(|it| panic!("{}: {it}", objects::kind_and_name(map)));
    example.unwrap_or_default()
}

/// Reads an object into its type and writes it again: an unknown or misspelt field is lost.
fn read_and_write<T: DeserializeOwned + Serialize>(object: &Value) -> Value {
    let name = objects::kind_and_name(object);
    let typed: T =
        serde_json::from_value(object.clone()).unwrap_or_else(|it| panic!("{name}: {it}"));
    serde_json::to_value(typed).unwrap()
}

#[test]
fn every_field_is_one_that_the_api_knows() {
    for object in all() {
        let same = match object["kind"].as_str().unwrap() {
            "Namespace" => read_and_write::<Namespace>(&object),
            "CustomResourceDefinition" => {
                // The CRD's schema has values that the type writes in another form.
                read_and_write::<CustomResourceDefinition>(&object);
                continue;
            }
            "ConfigMap" => read_and_write::<ConfigMap>(&object),
            "ServiceAccount" => read_and_write::<ServiceAccount>(&object),
            "ClusterRole" => read_and_write::<ClusterRole>(&object),
            "ClusterRoleBinding" => read_and_write::<ClusterRoleBinding>(&object),
            "Role" => read_and_write::<Role>(&object),
            "RoleBinding" => read_and_write::<RoleBinding>(&object),
            "FlowSchema" => read_and_write::<FlowSchema>(&object),
            "Service" => read_and_write::<Service>(&object),
            "NetworkPolicy" => read_and_write::<NetworkPolicy>(&object),
            "Deployment" => read_and_write::<Deployment>(&object),
            "DaemonSet" => read_and_write::<DaemonSet>(&object),
            "PodDisruptionBudget" => read_and_write::<PodDisruptionBudget>(&object),
            "HorizontalPodAutoscaler" => read_and_write::<HorizontalPodAutoscaler>(&object),
            other => panic!("{other} is not checked"),
        };
        assert_eq!(same, object, "{}", objects::kind_and_name(&object));
    }
}

#[test]
fn no_account_that_talks_to_the_api_server_shares_a_level_with_users() {
    let accounts = |clusterip| {
        let objects = objects::all(&InstallSettings { clusterip, ..InstallSettings::default() });
        let schemas = objects.iter().filter(|it| it["kind"] == "FlowSchema");
        let found = schemas.map(|schema| {
            let spec = &schema["spec"];
            let level = spec["priorityLevelConfiguration"]["name"].as_str().unwrap();
            assert!(!["workload-low", "global-default"].contains(&level), "{level}");
            let account = &spec["rules"][0]["subjects"][0]["serviceAccount"];
            assert_eq!(account["namespace"], NAMESPACE);
            account["name"].as_str().unwrap().to_owned()
        });
        found.collect::<BTreeSet<String>>()
    };
    assert_eq!(accounts(ClusterIpMode::Off), ["controller".to_owned()].into());
    let both = ["controller".to_owned(), "rouse-agent".to_owned()];
    assert_eq!(accounts(ClusterIpMode::All), both.into());
}

#[test]
fn events_of_agents_do_not_compete_with_kubelets() {
    let settings = InstallSettings { clusterip: ClusterIpMode::All, ..InstallSettings::default() };
    let objects = objects::all(&settings);
    let is_of_agents =
        |it: &&Value| it["kind"] == "FlowSchema" && it["metadata"]["name"] == "rouse-agent";
    let rule = &objects.iter().find(is_of_agents).unwrap()["spec"]["rules"][0];
    assert_eq!(rule["resourceRules"][0]["verbs"], serde_json::json!(["list", "watch"]));
    assert_eq!(rule.get("nonResourceRules"), None);
}

#[test]
fn an_agent_without_kube_proxy_knows_the_ranges_of_cluster_ips() {
    let variables = |settings: &InstallSettings| {
        let objects = objects::all(settings);
        let agent = objects.iter().find(|it| it["kind"] == "DaemonSet").unwrap().clone();
        let vars = agent["spec"]["template"]["spec"]["containers"][0]["env"].clone();
        let vars = vars.as_array().unwrap().clone().into_iter();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        vars.map(|it| (text(&it["name"]), text(&it["value"]))).collect::<BTreeMap<_, _>>()
    };
    let beside = InstallSettings { clusterip: ClusterIpMode::All, ..InstallSettings::default() };
    assert_eq!(variables(&beside).get("ROUSE_WITHOUT_KUBE_PROXY"), None);
    let mut without = InstallSettings { without_kube_proxy: true, ..beside };
    let vars = variables(&without);
    assert_eq!(vars["ROUSE_WITHOUT_KUBE_PROXY"], "true");
    assert_eq!(vars.get("ROUSE_SERVICE_CIDR"), None);
    without.service_cidr =
        vec!["10.96.0.0/12".parse().unwrap(), "fd00:10:96::/112".parse().unwrap()];
    assert_eq!(variables(&without)["ROUSE_SERVICE_CIDR"], "10.96.0.0/12,fd00:10:96::/112");
}

#[test]
fn names_are_unique_and_every_object_has_the_installation_s_label() {
    let mut names = BTreeSet::new();
    for object in all() {
        assert!(workloads::is_rouse_object(&object), "{}", objects::kind_and_name(&object));
        let namespace = object["metadata"]["namespace"].as_str().map(str::to_owned);
        assert!(
            names.insert((namespace, objects::kind_and_name(&object))),
            "{}",
            objects::kind_and_name(&object)
        );
    }
}

#[test]
fn everything_follows_the_namespace() {
    let settings = InstallSettings { namespace: "elsewhere".into(), ..InstallSettings::default() };
    let hard_coded: Vec<String> = objects::all(&settings)
        .iter()
        // ClusterRoles for users have Knative's names, whatever the namespace.
        .filter(|it| it.to_string().replace("knative-serving-namespaced-", "").contains(NAMESPACE))
        .map(objects::kind_and_name)
        .collect();
    assert!(hard_coded.is_empty(), "{hard_coded:?}");
}

#[test]
fn the_controller_accepts_every_shipped_setting_and_example() {
    for map in objects_of_kind("ConfigMap") {
        let name = map["metadata"]["name"].as_str().unwrap();
        let example = example_of(&map);
        let annotations = serde_json::from_value(map["metadata"]["annotations"].clone()).unwrap();
        let data = serde_json::from_value(map["data"].clone()).unwrap();
        for data in [data, example] {
            let problems = controller::model::config_maps::admit(name, &annotations, &data);
            assert_eq!(problems, Ok(Vec::new()), "{name}");
        }
    }
}

#[test]
fn examples_show_the_defaults() {
    let mut configs = Configs::default();
    for map in objects_of_kind("ConfigMap") {
        let name = map["metadata"]["name"].as_str().unwrap();
        configs.update(name, Some(&example_of(&map)));
    }
    let unset = Configs::default();
    assert_eq!(configs.autoscaler, unset.autoscaler);
    assert_eq!(configs.certmanager, unset.certmanager);
    // Without the setting, Kubernetes mounts the token.
    let mut defaults = RevisionDefaults::default();
    defaults.automount_service_account_token = Some(true);
    assert_eq!(*configs.defaults, defaults);
    assert_eq!(configs.deployment, unset.deployment);
    // The example shows a second domain, for services with its labels.
    assert_eq!(configs.domain.domain_for(&BTreeMap::new()), Some("example.com"));
    assert_eq!(configs.features, unset.features);
    assert_eq!(configs.gc, unset.gc);
    assert_eq!(configs.leader_election, unset.leader_election);
    assert_eq!(configs.logging.levels(), unset.logging.levels());
    // Without the settings these templates hold.
    let network = NetworkConfig::clone(&configs.network);
    assert_eq!(network.domain_template.as_ref().map(GoTemplate::source), Some(DOMAIN_TEMPLATE));
    assert_eq!(network.tag_template.as_ref().map(GoTemplate::source), Some(TAG_TEMPLATE));
    let network = NetworkConfig { domain_template: None, tag_template: None, ..network };
    assert_eq!(network, *unset.network);
    assert_eq!(configs.observability, unset.observability);
    assert_eq!(configs.tracing, unset.tracing);
}

#[test]
fn the_example_shows_the_default_template_of_request_logs() {
    let maps = objects_of_kind("ConfigMap");
    let is_observability = |it: &&Value| it["metadata"]["name"] == "config-observability";
    let example = example_of(maps.iter().find(is_observability).unwrap());
    assert_eq!(example["logging.request-log-template"], request_log::DEFAULT_TEMPLATE);
}

#[test]
fn only_the_agent_has_rights_on_its_node() {
    for deployment in objects_of_kind("Deployment") {
        let pod = &deployment["spec"]["template"]["spec"];
        let name = objects::kind_and_name(&deployment);
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true, "{name}");
        assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault", "{name}");
        for container in containers(&deployment) {
            let context = &container["securityContext"];
            assert_eq!(context["readOnlyRootFilesystem"], true, "{name}");
            assert_eq!(context["allowPrivilegeEscalation"], false, "{name}");
            assert_eq!(context["capabilities"], serde_json::json!({"drop": ["ALL"]}), "{name}");
        }
        assert_eq!(pod.get("hostNetwork"), None, "{name}");
    }
    let agent = &objects_of_kind("DaemonSet")[0];
    let added: Vec<&str> = agent::CAPABILITIES.iter().map(|(name, _)| *name).collect();
    for container in containers(agent) {
        let context = &container["securityContext"];
        assert_eq!(context.get("privileged"), None);
        assert_eq!(context["capabilities"]["add"], serde_json::json!(added));
    }
    // Operators review the annotation, so that a capability without a reason there is a fault.
    for (name, _) in agent::CAPABILITIES {
        let capabilities = agent["metadata"]["annotations"]["rouse.dev/needs"].as_str().unwrap();
        assert!(capabilities.contains(name), "{name} is given without a reason");
    }
}

#[test]
fn only_the_controller_gets_a_token_for_the_api_server() {
    for account in objects_of_kind("ServiceAccount") {
        assert_eq!(account["automountServiceAccountToken"], false);
    }
    let with_token = |object: &&Value| {
        object["spec"]["template"]["spec"]["automountServiceAccountToken"] == true
    };
    let workloads = [objects_of_kind("Deployment"), objects_of_kind("DaemonSet")].concat();
    let names: Vec<String> =
        workloads.iter().filter(with_token).map(objects::kind_and_name).collect();
    assert_eq!(names, ["Deployment/controller"]);
    for binding in [objects_of_kind("ClusterRoleBinding"), objects_of_kind("RoleBinding")].concat()
    {
        let subjects = binding["subjects"].as_array().unwrap();
        let names: Vec<&Value> = subjects.iter().map(|it| &it["name"]).collect();
        assert_eq!(names, [&Value::from("controller")], "{}", objects::kind_and_name(&binding));
    }
}

#[test]
fn an_uninstall_knows_the_objects_of_all_modes() {
    let names = |objects: Vec<Value>| -> BTreeSet<String> {
        objects.iter().map(objects::kind_and_name).collect()
    };
    let removed = names(objects::all_possible(&InstallSettings::default()));
    for clusterip in [ClusterIpMode::Off, ClusterIpMode::Labelled, ClusterIpMode::All] {
        let settings = InstallSettings { clusterip, ..InstallSettings::default() };
        let left: Vec<_> = names(objects::all(&settings)).difference(&removed).cloned().collect();
        assert_eq!(left, [""; 0], "{clusterip:?}");
    }
    assert!(removed.contains("ClusterRoleBinding/rouse-agent"), "{removed:?}");
}

#[test]
fn agents_stay_while_nothing_else_serves_cluster_ips() {
    let settings = |without_kube_proxy| {
        let clusterip = ClusterIpMode::All;
        InstallSettings { clusterip, without_kube_proxy, ..InstallSettings::default() }
    };
    let agents = |without_kube_proxy| {
        let objects = objects::all(&settings(without_kube_proxy));
        objects.into_iter().find(|it| it["kind"] == "DaemonSet").unwrap()
    };
    let check = kube_proxy_check::check_daemon_set;
    let error = check(&agents(true)).unwrap_err().to_string();
    assert!(error.contains("start kube-proxy"), "{error}");
    // The last one is what an uninstall that was interrupted has left.
    let removal = workloads::agent_removal_daemon_set(&settings(true));
    for fine in [Value::Null, agents(false), removal] {
        check(&fine).unwrap();
    }
}

#[test]
fn an_agent_that_serves_services_of_the_cluster_may_read_them_and_write_events() {
    for clusterip in [ClusterIpMode::Labelled, ClusterIpMode::All] {
        let objects = objects::all(&InstallSettings { clusterip, ..InstallSettings::default() });
        let find = |name: &str| {
            let is_it = |it: &&Value| objects::kind_and_name(it) == name;
            objects.iter().find(is_it).unwrap_or_else(|| panic!("no {name}"))
        };
        let pod = &find("DaemonSet/rouse-agent")["spec"]["template"]["spec"];
        assert_eq!(pod["automountServiceAccountToken"], true);
        let vars = pod["containers"][0]["env"].as_array().unwrap();
        let mode = vars.iter().find(|it| it["name"] == "ROUSE_CLUSTERIP").unwrap();
        let name = clusterip.to_possible_value().unwrap();
        assert_eq!(mode["value"], name.get_name());
        let is_state = |it: &Value| it["name"] == "state";
        assert!(pod["volumes"].as_array().unwrap().iter().any(is_state));
        assert!(pod["containers"][0]["volumeMounts"].as_array().unwrap().iter().any(is_state));
        assert!(vars.iter().all(|it| it["name"] != "ROUSE_APISERVERS"));
        let subject = &find("ClusterRoleBinding/rouse-agent")["subjects"][0];
        assert_eq!(subject["name"], "rouse-agent");
        let rules = find("ClusterRole/rouse-agent")["rules"].as_array().unwrap();
        // It writes nothing but Events.
        for rule in rules.iter().filter(|rule| rule["resources"][0] != "events") {
            assert_eq!(rule["verbs"], serde_json::json!(["get", "list", "watch"]));
        }
    }
}

#[test]
fn sizes_of_maps_reach_the_agent_only_if_they_are_given() {
    let sizes = |map_sizes: &str| {
        let map_sizes = map_sizes.parse().unwrap();
        let objects = objects::all(&InstallSettings { map_sizes, ..InstallSettings::default() });
        let is_agent = |it: &&Value| objects::kind_and_name(it) == "DaemonSet/rouse-agent";
        let agent = objects.iter().find(is_agent).unwrap();
        let vars = agent["spec"]["template"]["spec"]["containers"][0]["env"].as_array().unwrap();
        let sizes = vars.iter().find(|it| it["name"] == "ROUSE_MAP_SIZES");
        sizes.map(|it| it["value"].as_str().unwrap().to_owned())
    };
    assert_eq!(sizes(""), None);
    let given = "list-entries=524288, backends=65536";
    assert_eq!(sizes(given).as_deref(), Some("backends=65536,list-entries=524288"));
}

#[test]
fn agents_report_to_the_port_that_activators_open() {
    let all = objects::all(&InstallSettings::default());
    let peer_port = |name: &str| {
        let object = all.iter().find(|it| objects::kind_and_name(it) == name).unwrap();
        let vars = containers(object)[0]["env"].as_array().unwrap();
        let var = vars.iter().find(|it| it["name"] == "ROUSE_ACTIVATOR_PEER_PORT").unwrap();
        var["value"].clone()
    };
    assert_eq!(peer_port("DaemonSet/rouse-agent"), peer_port("Deployment/activator"));
}

#[test]
fn agents_get_the_api_servers_of_the_installation() {
    let settings = InstallSettings {
        clusterip: ClusterIpMode::All,
        apiservers: ["https://10.0.0.1:6443", "https://[fd00::1]"]
            .map(|it| it.parse().unwrap())
            .into(),
        ..InstallSettings::default()
    };
    let objects = objects::all(&settings);
    let agent = objects.iter().find(|it| it["kind"] == "DaemonSet").unwrap();
    let vars = containers(agent)[0]["env"].as_array().unwrap();
    let servers = vars.iter().find(|it| it["name"] == "ROUSE_APISERVERS").unwrap();
    assert_eq!(servers["value"], "https://10.0.0.1:6443,https://[fd00::1]:443");
}

#[test]
fn agents_read_the_kubeconfig_of_the_kubelet_if_the_installation_names_it() {
    let settings = |kubelet_kubeconfig| InstallSettings {
        clusterip: ClusterIpMode::All,
        kubelet_kubeconfig,
        ..InstallSettings::default()
    };
    let agent = |settings| {
        let objects = objects::all(&settings);
        objects.into_iter().find(|it| it["kind"] == "DaemonSet").unwrap()
    };
    let named = agent(settings(Some("/etc/kubernetes/kubelet.conf".into())));
    // Fields that Kubernetes does not know would be dropped without an error.
    read_and_write::<DaemonSet>(&named);
    let pod = &named["spec"]["template"]["spec"];
    let volumes = pod["volumes"].as_array().unwrap();
    let volume = volumes.iter().find(|it| it["name"] == "kubelet-kubeconfig").unwrap();
    assert_eq!(volume["hostPath"]["path"], "/etc/kubernetes/kubelet.conf");
    let container = containers(&named)[0];
    let mounts = container["volumeMounts"].as_array().unwrap();
    let mount = mounts.iter().find(|it| it["name"] == "kubelet-kubeconfig").unwrap();
    let vars = container["env"].as_array().unwrap();
    let var = vars.iter().find(|it| it["name"] == "ROUSE_KUBELET_KUBECONFIG").unwrap();
    assert_eq!(mount["mountPath"], var["value"]);
    assert_eq!(mount["readOnly"], true);
    let unnamed = agent(settings(None)).to_string();
    assert!(!unnamed.contains("kubeconfig"), "{unnamed}");
}

/// Command with the options of `rouse install` only.
#[derive(Debug, clap::Parser)]
struct InstallOptions {
    #[command(flatten)]
    args: super::InstallArgs,
}

#[test]
fn api_servers_that_cannot_be_used_are_refused_with_the_reason() {
    let parse = |args: &[&str]| InstallOptions::try_parse_from([&["install"][..], args].concat());
    let good = "--apiserver=https://10.0.0.1:6443,https://10.0.0.2:6443";
    let settings = parse(&["--clusterip=all", good]).unwrap().args.settings().unwrap();
    assert_eq!(settings.apiservers.len(), 2);
    let unused = parse(&[good]).unwrap().args.settings().unwrap_err().to_string();
    assert!(unused.starts_with("--apiserver needs --clusterip labelled or all"), "{unused}");
    let refused_file = |args: &[&str]| {
        let settings = parse(args).unwrap().args.settings();
        settings.unwrap_err().to_string()
    };
    let unused = refused_file(&["--kubelet-kubeconfig=/etc/kubernetes/kubelet.conf"]);
    assert!(unused.starts_with("--kubelet-kubeconfig needs --clusterip"), "{unused}");
    let relative = refused_file(&["--clusterip=all", "--kubelet-kubeconfig=kubelet.conf"]);
    assert!(relative.ends_with("must be an absolute path on the nodes"), "{relative}");
    let own = "--apiserver=https://kubernetes.default.svc";
    let refused = parse(&["--clusterip=all", own]).unwrap_err().to_string();
    assert!(refused.contains("and not a name of the Service `kubernetes`"), "{refused}");
}

/// Panics if a list below a value has two entries of one name: the API server refuses such an object.
fn assert_names_are_unique(value: &Value, path: &str) {
    match value {
        Value::Object(fields) => {
            for (key, field) in fields {
                assert_names_are_unique(field, &format!("{path}.{key}"));
            }
        }
        Value::Array(items) => {
            let mut names = BTreeSet::new();
            for item in items {
                let name = item["name"].as_str();
                assert!(name.is_none_or(|it| names.insert(it)), "{path} has {name:?} twice");
                assert_names_are_unique(item, path);
            }
        }
        _ => {}
    }
}

#[test]
fn no_list_of_an_object_has_two_entries_of_one_name() {
    for clusterip in [ClusterIpMode::Off, ClusterIpMode::Labelled, ClusterIpMode::All] {
        for without_kube_proxy in [false, true] {
            let settings =
                InstallSettings { clusterip, without_kube_proxy, ..InstallSettings::default() };
            let mut objects = objects::all_possible(&settings);
            objects.extend(objects::all(&settings));
            objects.push(workloads::agent_removal_daemon_set(&settings));
            for object in objects.iter().filter(|it| it["kind"] != "ClusterRole") {
                assert_names_are_unique(object, &objects::kind_and_name(object));
            }
        }
    }
}

#[test]
fn the_removal_of_agents_reaches_their_files_on_the_node() {
    // An uninstall takes the settings of all modes.
    let settings = InstallSettings { clusterip: ClusterIpMode::All, ..InstallSettings::default() };
    let removal = workloads::agent_removal_daemon_set(&settings);
    read_and_write::<DaemonSet>(&removal);
    let pod = &removal["spec"]["template"]["spec"];
    let mounts = pod["initContainers"][0]["volumeMounts"].as_array().unwrap();
    let paths: Vec<&Value> = mounts.iter().map(|it| &it["mountPath"]).collect();
    assert_eq!(paths, ["/sys/fs/bpf", "/var/lib/rouse-agent"]);
    for mount in mounts {
        let volumes = pod["volumes"].as_array().unwrap();
        assert!(volumes.iter().any(|it| it["name"] == mount["name"]), "{mount}");
    }
    let vars = pod["initContainers"][0]["env"].as_array().unwrap();
    assert!(vars.iter().any(|it| it["name"] == "ROUSE_STATE"));
    // The routes are in the node's own network.
    assert_eq!(pod["hostNetwork"], true);
    let added = &pod["initContainers"][0]["securityContext"]["capabilities"]["add"];
    assert!(added.as_array().unwrap().contains(&"NET_ADMIN".into()), "{added}");
}

#[test]
fn no_secret_can_be_listed_and_no_verb_is_without_a_reason() {
    for rule in rbac::CLUSTER_RULES
        .iter()
        .chain(&rbac::ADMISSION_RULES)
        .chain(&rbac::NAMESPACE_RULES)
        .chain(&rbac::AGENT_RULES)
    {
        assert!(!rule.reason.is_empty(), "{:?}", rule.resources);
        let wild = rule.verbs.iter().chain(rule.resources).chain(rule.groups).any(|it| *it == "*");
        assert!(!wild, "{:?}", rule.resources);
        if rule.resources.contains(&"secrets") {
            assert!(rule.verbs.iter().all(|verb| !["list", "watch"].contains(verb)));
            let reads_or_makes = rule.verbs == ["create"] || rule.verbs == ["get"];
            assert!(reads_or_makes || !rule.names.is_empty());
        }
    }
}

#[test]
fn the_controller_may_list_each_kind_that_it_watches() {
    let may_list = |rules: &[rbac::RbacRule], group: &str, plural: &str| {
        rules.iter().any(|rule| {
            let is_about = rule.groups.contains(&group) && rule.resources.contains(&plural);
            let has_verbs = ["list", "watch"].iter().all(|verb| rule.verbs.contains(verb));
            is_about && has_verbs && rule.names.is_empty()
        })
    };
    let of_gateways = [gateway_scopes(), grpc_route_scopes(), ingress_scopes()].concat();
    let optional = [request_scopes(), cert_manager_scopes(), of_gateways].concat();
    for scope in [watch_scopes(NAMESPACE), workload_scopes(NAMESPACE), optional].concat() {
        let (group, plural) = (scope.resource.group(), scope.resource.plural());
        let is_permitted = may_list(&rbac::CLUSTER_RULES, group, plural)
            || (scope.namespace.is_some() && may_list(&rbac::NAMESPACE_RULES, group, plural));
        assert!(is_permitted, "{}", scope.label());
    }
}

#[test]
fn the_controller_may_write_the_replicas_of_both_kinds_of_workloads() {
    for resource in [ResourceKind::Deployment, ResourceKind::StatefulSet] {
        // A conflict is followed by a read, and a workload is read before it is given back.
        for verb in ["get", "patch"] {
            let is_permitted = rbac::CLUSTER_RULES.iter().any(|rule| {
                rule.groups.contains(&resource.group())
                    && rule.resources.contains(&resource.plural())
                    && rule.verbs.contains(&verb)
            });
            assert!(is_permitted, "{verb} {resource}");
        }
    }
}

#[test]
fn the_controller_may_write_the_statuses_of_the_gateway_api() {
    for resource in [
        ResourceKind::GatewayClass,
        ResourceKind::Gateway,
        ResourceKind::HttpRoute,
        ResourceKind::GrpcRoute,
    ] {
        let status = format!("{}/status", resource.plural());
        let is_permitted = rbac::CLUSTER_RULES.iter().any(|rule| {
            rule.groups.contains(&resource.group())
                && rule.resources.contains(&status.as_str())
                && rule.verbs.contains(&"patch")
        });
        assert!(is_permitted, "{status}");
    }
}

#[test]
fn the_controller_may_write_the_record_of_gateway_ports() {
    for verb in ["get", "patch"] {
        let is_permitted = rbac::NAMESPACE_RULES.iter().any(|rule| {
            rule.resources.contains(&"configmaps")
                && rule.names.contains(&PORT_RECORD_NAME)
                && rule.verbs.contains(&verb)
        });
        assert!(is_permitted, "{verb}");
    }
}

#[test]
fn the_controller_may_resize_pods() {
    // The pod is read before it is resized, and its original requests are noted on it.
    for (resource, verb) in [("pods", "get"), ("pods", "patch"), ("pods/resize", "patch")] {
        let is_permitted = rbac::CLUSTER_RULES.iter().any(|rule| {
            rule.groups.contains(&"")
                && rule.resources.contains(&resource)
                && rule.verbs.contains(&verb)
                && rule.names.is_empty()
        });
        assert!(is_permitted, "{verb} {resource}");
    }
}

#[test]
fn the_gateway_is_exposed_as_requested() {
    let exposure = |gateway| {
        let objects = objects::all(&InstallSettings { gateway, ..InstallSettings::default() });
        let find = |name: &str| {
            objects.iter().find(|it| objects::kind_and_name(it) == name).cloned().unwrap()
        };
        let port =
            find("Deployment/activator")["spec"]["template"]["spec"]["containers"][0]["ports"][0]
                .clone();
        (find("Service/rouse-gateway")["spec"]["type"].clone(), port.get("hostPort").cloned())
    };
    assert_eq!(exposure(GatewayExposure::Loadbalancer), ("LoadBalancer".into(), None));
    assert_eq!(exposure(GatewayExposure::Nodeport), ("NodePort".into(), None));
    assert_eq!(exposure(GatewayExposure::Hostport), ("ClusterIP".into(), Some(80.into())));
}

#[test]
fn the_gateway_has_https_in_each_exposure() {
    for (gateway, host_ports) in [
        (GatewayExposure::Loadbalancer, [None, None]),
        (GatewayExposure::Nodeport, [None, None]),
        (GatewayExposure::Hostport, [Some(80), Some(443)]),
    ] {
        let objects = objects::all(&InstallSettings { gateway, ..InstallSettings::default() });
        let find = |name: &str| {
            objects.iter().find(|it| objects::kind_and_name(it) == name).cloned().unwrap()
        };
        let (service, activator) = (find("Service/rouse-gateway"), find("Deployment/activator"));
        let container = containers(&activator)[0];
        let ports = ["http", "https"].map(|name| {
            let is_it = |it: &&Value| it["name"] == name;
            let outside = service["spec"]["ports"].as_array().unwrap().iter().find(is_it).unwrap();
            let inside = container["ports"].as_array().unwrap().iter().find(is_it).unwrap();
            assert_eq!(outside["targetPort"], inside["containerPort"], "{name} {gateway:?}");
            (outside["port"].clone(), inside.get("hostPort").and_then(Value::as_u64))
        });
        assert_eq!(ports, [(80.into(), host_ports[0]), (443.into(), host_ports[1])], "{gateway:?}");
        // Tests and users of the node port read the first one.
        assert_eq!(service["spec"]["ports"][0]["name"], "http", "{gateway:?}");
        let vars = container["env"].as_array().unwrap();
        let is_tls_port = |it: &&Value| it["name"] == "ROUSE_ACTIVATOR_OUTSIDE_TLS_PORT";
        let listened = vars.iter().find(is_tls_port).unwrap();
        assert_eq!(listened["value"], workloads::GATEWAY_TLS_PORT.to_string(), "{gateway:?}");
    }
}

#[test]
fn the_fast_profile_leaves_the_token_out_and_binds_pods() {
    let settings = InstallSettings { profile: InstallProfile::Fast, ..InstallSettings::default() };
    let objects = configs::all(&settings);
    let defaults = objects.iter().find(|it| it["metadata"]["name"] == "config-defaults").unwrap();
    assert_eq!(defaults["data"]["automount-service-account-token"], "false");
    let deployment =
        objects.iter().find(|it| it["metadata"]["name"] == "config-deployment").unwrap();
    assert_eq!(deployment["data"]["bind-pods"], "true");
}

#[test]
fn the_controller_reads_trusted_proxies_from_config_network() {
    let trusted_proxies = vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()];
    let settings =
        InstallSettings { trusted_proxies, proxy_protocol: true, ..InstallSettings::default() };
    let objects = objects::all(&settings);
    let map =
        objects.iter().find(|it| objects::kind_and_name(it) == "ConfigMap/config-network").unwrap();
    let data = serde_json::from_value(map["data"].clone()).unwrap();
    let mut configs = Configs::default();
    configs.update("config-network", Some(&data));
    assert_eq!(configs.network.edge.trusted_proxies, settings.trusted_proxies);
    assert!(configs.network.edge.requires_proxy_protocol);
}

#[test]
fn gateway_ports_are_open_in_each_way_of_exposure() {
    for gateway in GatewayExposure::value_variants() {
        let gateway_ports = vec![NonZeroU16::new(25).unwrap(), NonZeroU16::new(5432).unwrap()];
        let settings =
            InstallSettings { gateway: *gateway, gateway_ports, ..InstallSettings::default() };
        let objects = objects::all(&settings);
        let find = |name: &str| {
            objects.iter().find(|it| objects::kind_and_name(it) == name).unwrap().clone()
        };
        let service = find("Service/rouse-gateway");
        let is_open = |ports: &Value, field: &str, port: u16| {
            ports.as_array().unwrap().iter().any(|it| it[field] == port)
        };
        let pod = find("Deployment/activator")["spec"]["template"]["spec"].clone();
        let container = &pod["containers"][0];
        let admitted = &find("NetworkPolicy/activator")["spec"]["ingress"][0]["ports"];
        for port in [25, 5432] {
            assert!(is_open(&service["spec"]["ports"], "port", port), "{gateway:?}");
            assert!(is_open(&service["spec"]["ports"], "targetPort", port), "{gateway:?}");
            assert!(is_open(&container["ports"], "containerPort", port), "{gateway:?}");
            let is_on_nodes = is_open(&container["ports"], "hostPort", port);
            assert_eq!(is_on_nodes, *gateway == GatewayExposure::Hostport, "{gateway:?}");
            assert!(is_open(admitted, "port", port), "{gateway:?}");
        }
        // The lowest port that a process without rights may bind: port 25 is one of root otherwise.
        assert_eq!(pod["securityContext"]["sysctls"][0]["value"], "25");
        let map = find("ConfigMap/config-network");
        assert_eq!(map["data"]["rouse.dev.gateway-ports"], "25,5432");
    }
}

#[test]
fn no_gateway_port_is_one_that_activators_listen_on() {
    use workloads::{GATEWAY_PORT, GATEWAY_TLS_PORT, INTERNAL_PORT, PEER_PORT, admin_port};
    let is_reserved = |port: u16| {
        let range = ControllerSettings::default().activator_port_range;
        is_reserved_gateway_port(NonZeroU16::new(port).unwrap(), range)
    };
    let own = [GATEWAY_PORT, GATEWAY_TLS_PORT, INTERNAL_PORT, PEER_PORT, admin_port("activator")];
    for port in own.into_iter().chain([80, 443, 20_000, 29_999]) {
        assert!(is_reserved(port), "{port}");
    }
    assert!(!is_reserved(5432) && !is_reserved(30_000));
}

#[test]
fn the_activator_policy_admits_the_ports_of_all_services() {
    let policies = objects_of_kind("NetworkPolicy");
    let is_activator = |it: &&Value| it["metadata"]["name"] == "activator";
    let policy = policies.iter().find(is_activator).expect("a policy of the activators");
    let ports = policy["spec"]["ingress"][0]["ports"].as_array().expect("ports");
    let (first, last) = ControllerSettings::default().activator_port_range;
    assert!(ports.iter().any(|it| it["port"] == first && it["endPort"] == last), "{ports:?}");
}

#[test]
fn the_activator_policy_admits_both_ports_of_the_gateway() {
    let policies = objects_of_kind("NetworkPolicy");
    let is_activator = |it: &&Value| it["metadata"]["name"] == "activator";
    let policy = policies.iter().find(is_activator).expect("a policy of the activators");
    let public = &policy["spec"]["ingress"][0];
    assert_eq!(public.get("from"), None, "clients from anywhere");
    let ports = public["ports"].as_array().expect("ports");
    for port in [workloads::GATEWAY_PORT, workloads::GATEWAY_TLS_PORT] {
        assert!(ports.iter().any(|it| it["port"] == port), "{port}: {ports:?}");
    }
}
