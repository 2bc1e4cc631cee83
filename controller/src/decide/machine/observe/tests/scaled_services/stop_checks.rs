//! Stop checks of pods of users' workloads.

use super::*;
use crate::decide::machine::observe::tests::stop_checks::{
    answer_with_object, report_stop, take_read,
};

/// A StatefulSet gives the name of a pod that has ended to the next one.
#[test]
fn a_pod_whose_name_another_one_has_by_now_is_gone() {
    let mut api_server = scaled(STATEFUL_SET);
    let at = (ResourceKind::Pod, name("web-0"));
    let old = api_server.objects[&at]["metadata"]["uid"].as_str().expect("a UID").to_owned();
    report_stop(&mut api_server, &old, true);
    let read = take_read(&mut api_server);
    let new = "00000000-0000-4000-9000-00000000ffff";
    api_server.objects.get_mut(&at).expect("a pod")["metadata"]["uid"] = json!(new);
    answer_with_object(&mut api_server, &read);
    let pods = api_server.table().pods;
    assert!(!pods.contains_key(&old) && !pods[new].container_restarts);
    report_stop(&mut api_server, new, true);
    let read = take_read(&mut api_server);
    answer_with_object(&mut api_server, &read);
    assert!(api_server.table().pods[new].container_restarts);
}
