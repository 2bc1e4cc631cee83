//! Pure: stored objects → an [`AppState`], so that a restarted controller continues where it stopped.

use std::sync::Arc;

use common::decimal::parse_digits;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use crate::{
    model::{
        cluster_state::{
            AppRevision, AppState, ClusterIpSource, CompactStringMap, ConfigurationState,
            ObjectMetaSummary, RevisionPod, RevisionScaling, RouteNameAllocation, RouteState,
            ServiceManifest, ServiceState, StandbyStop, UnixMillis,
            conditions::{
                CONFIGURATION_CONDITIONS, REVISION_CONDITIONS, ROUTE_CONDITIONS, SERVICE_CONDITIONS,
            },
        },
        knative::key::{self, ADDRESS_ANNOTATION, BOOT_ANNOTATION, STANDBY_SINCE},
        object::{
            json::{annotation, array_items, non_empty_text},
            names::child_name,
        },
    },
    read::fields::{
        canonical_template, object_meta, read_assigned_traffic, read_conditions, read_meta,
        read_routing, read_traffic_spec, to_unix_millis,
    },
};

/// Objects of one app, as read from disk.
#[derive(Clone, Debug, Default)]
pub struct StoredAppObjects {
    /// The app's Service object.
    pub service: Value,
    /// The app's Configuration object.
    pub configuration: Value,
    /// The app's Route object.
    pub route: Value,
    /// Revision objects of the app, in any order.
    pub revisions: Vec<Value>,
    /// Pod objects of the app, in any order.
    pub pods: Vec<Value>,
}

/// Builds the app that these objects describe. `boot_id` identifies this boot of the machine: pods of an earlier boot
/// no longer exist.
pub fn restore_app(objects: &StoredAppObjects, boot_id: &str) -> AppState {
    let manifest = read_manifest(&objects.service);
    let status = &objects.service["status"];
    let mut app = AppState {
        configuration: Some(ConfigurationState {
            meta: read_meta(&objects.configuration),
            revision_name: manifest.revision_name.clone(),
            template: Arc::clone(&manifest.template),
            latest_ready: non_empty_text(&status["latestReadyRevisionName"]),
            ..ConfigurationState::default()
        }),
        route: Some(RouteState {
            meta: read_meta(&objects.route),
            traffic_spec: Arc::clone(&manifest.traffic),
            allocations: parse_allocations(&objects.route),
            traffic: array_items(&status["traffic"]).filter_map(read_assigned_traffic).collect(),
            ..RouteState::default()
        }),
        ..AppState::default()
    };
    app.revisions =
        objects.revisions.iter().map(|it| restore_revision(it, objects, boot_id)).collect();
    // In the order of their creation, as the app had them: the last one is the latest.
    app.revisions.sort_by(|a, b| (a.meta.generation, &a.name).cmp(&(b.meta.generation, &b.name)));
    read_conditions(&mut app.conditions, &objects.service, &SERVICE_CONDITIONS);
    read_conditions(&mut app.conditions, &objects.configuration, &CONFIGURATION_CONDITIONS);
    read_conditions(&mut app.conditions, &objects.route, &ROUTE_CONDITIONS);
    // Each Revision's template was read as a text of its own. Equal ones share memory, as before the restart.
    for revision in &mut app.revisions {
        if revision.template == manifest.template {
            revision.template = Arc::clone(&manifest.template);
        }
    }
    let meta = read_meta(&objects.service);
    app.service = Some(ServiceState { meta, manifest, ..ServiceState::default() });
    app
}

fn read_manifest(service: &Value) -> ServiceManifest {
    let meta = object_meta(service);
    let template = &service["spec"]["template"];
    let is_empty = template.is_null() || template.as_str() == Some("");
    ServiceManifest {
        labels: meta.labels.as_ref().map(CompactStringMap::from).unwrap_or_default(),
        annotations: meta.annotations.as_ref().map(CompactStringMap::from).unwrap_or_default(),
        revision_name: non_empty_text(&template["metadata"]["name"]),
        template: if is_empty { Arc::from("") } else { canonical_template(template) },
        traffic: array_items(&service["spec"]["traffic"]).map(read_traffic_spec).collect(),
    }
}

/// Parses the annotation with the Route's allocations: words of the form `tag=suffix:port`. The suffix is the last 16
/// bits of the ClusterIPs.
fn parse_allocations(route: &Value) -> Vec<RouteNameAllocation> {
    let parse_word = |word: &str| {
        let (tag, numbers) = word.split_once('=')?;
        let (suffix, port) = numbers.split_once(':')?;
        let tag = Some(tag).filter(|tag| !tag.is_empty()).map(Into::into);
        let cluster_ips = ClusterIpSource::LocalRange(parse_digits(suffix)?);
        Some(RouteNameAllocation { tag, cluster_ips, activator_port: parse_digits(port)? })
    };
    let words = annotation(route, key::ALLOCATIONS).unwrap_or_default().split_whitespace();
    words.filter_map(parse_word).collect()
}

/// Builds a Revision with its pods of this boot. Pods of an earlier boot no longer run.
fn restore_revision(value: &Value, objects: &StoredAppObjects, boot_id: &str) -> AppRevision {
    // The generation is the Configuration's, from a label. The object's own `metadata.generation` is 1.
    let meta = object_meta(value);
    let label = |name: &str| meta.labels.as_ref().and_then(|it| it.get(name)).map(String::as_str);
    let generation: u32 =
        label(key::CONFIGURATION_GENERATION).and_then(|it| it.parse().ok()).unwrap_or_default();
    let modified = annotation(value, key::ROUTING_STATE_MODIFIED);
    let name = meta.name.clone().unwrap_or_default();
    let is_own_pod = |pod: &&Value| pod["metadata"]["labels"][key::REVISION] == *name;
    let own_pods = objects.pods.iter().filter(is_own_pod);
    let digest =
        |it: &Value| Some((non_empty_text(&it["name"])?, non_empty_text(&it["imageDigest"])?));
    let mut revision = AppRevision {
        meta: ObjectMetaSummary { generation, ..read_meta(value) },
        template: revision_template(value, &meta, generation, &objects.service),
        routing: read_routing(label(key::ROUTING_STATE), modified),
        scaling: RevisionScaling {
            initial_scale_reached: annotation(value, key::INITIAL_SCALE_REACHED) == Some("true"),
            ..RevisionScaling::default()
        },
        digests: array_items(&value["status"]["containerStatuses"]).filter_map(digest).collect(),
        pods: own_pods.filter_map(|it| restore_pod(it, boot_id)).collect(),
        name: name.into(),
        ..AppRevision::default()
    };
    read_conditions(&mut revision.conditions, value, &REVISION_CONDITIONS);
    // The conditions are all that was stored of a stop.
    revision.scaling.standby_stop = StandbyStop::from_conditions(&revision.conditions);
    revision
}

/// Returns the template from which a Revision was made, without the controller's additions to its metadata.
fn revision_template(
    value: &Value,
    meta: &ObjectMeta,
    generation: u32,
    service: &Value,
) -> Arc<str> {
    let set_by_user = |map: &Option<std::collections::BTreeMap<String, String>>| {
        let mut map = map.clone().unwrap_or_default();
        map.retain(|name, _| key::is_set_by_user(name));
        Some(map).filter(|map| !map.is_empty())
    };
    // A name chosen by the user is part of the template; a generated one is not. A chosen name may equal the generated
    // one: then only the Service's present template shows that it was chosen.
    let present_name = &service["spec"]["template"]["metadata"]["name"];
    let service_name = service["metadata"]["name"].as_str().unwrap_or_default();
    let generated_name = child_name(service_name, &format!("-{generation:05}"));
    let is_chosen = |name: &String| *name != generated_name || *present_name == *name;
    let metadata = ObjectMeta {
        name: meta.name.clone().filter(is_chosen),
        labels: set_by_user(&meta.labels),
        annotations: set_by_user(&meta.annotations),
        ..ObjectMeta::default()
    };
    let spec = serde_json::from_value(value["spec"].clone()).unwrap_or_default();
    let typed = crate::model::knative::RevisionTemplate { metadata, spec };
    serde_json::to_string(&typed).unwrap_or_default().into()
}

fn restore_pod(value: &Value, boot_id: &str) -> Option<RevisionPod> {
    let meta = object_meta(value);
    // A reboot ends all containers, so the addresses of an earlier boot's pods may belong to others by now.
    if meta.deletion_timestamp.is_some() || annotation(value, BOOT_ANNOTATION) != Some(boot_id) {
        return None;
    }
    let last_address = annotation(value, ADDRESS_ANNOTATION).and_then(|text| text.parse().ok());
    let created = meta.creation_timestamp.as_ref().map(to_unix_millis)?;
    Some(RevisionPod {
        was_ready: last_address.is_some(),
        may_have_requests: last_address.is_some(),
        restored_address: last_address,
        standby_since: annotation(value, STANDBY_SINCE).and_then(UnixMillis::parse),
        ..RevisionPod::new(meta.uid?.into(), meta.name?.into(), created)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_revision_keeps_its_chosen_name_in_its_template_after_later_ones() {
        let spec = json!({"containers": [{"image": "a"}]});
        let revision = |name: &str, generation: &str| {
            let labels = json!({(key::CONFIGURATION_GENERATION): generation});
            json!({"metadata": {"name": name, "labels": labels}, "spec": spec})
        };
        let template = json!({"metadata": {"name": "hello-v3"}, "spec": spec});
        let objects = StoredAppObjects {
            service: json!({"metadata": {"name": "hello"}, "spec": {"template": template}}),
            revisions: vec![
                revision("hello-00001", "1"),
                revision("hello-v2", "2"),
                revision("hello-v3", "3"),
            ],
            ..StoredAppObjects::default()
        };
        let app = restore_app(&objects, "boot");
        let templates: Vec<&str> = app.revisions.iter().map(|it| &*it.template).collect();
        let metadata = [json!({}), json!({"name": "hello-v2"}), json!({"name": "hello-v3"})];
        let expected =
            metadata.map(|it| canonical_template(&json!({"metadata": it, "spec": spec})));
        assert_eq!(templates, expected.each_ref().map(|it| &**it));
    }
}
