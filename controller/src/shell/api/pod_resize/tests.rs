use super::*;

/// Returns a running pod with one container of these requests, on a node that resizes pods.
fn pod(requests: Value) -> Value {
    let container = json!({"name": "user-container", "resources": {"requests": requests}});
    pod_of(json!({"containers": [container]}))
}

fn pod_of(spec: Value) -> Value {
    let container = json!({"name": "user-container", "state": {"running": {}}, "resources": {}});
    json!({
        "metadata": {"name": "a", "uid": "u", "resourceVersion": "7"},
        "spec": spec,
        "status": {"qosClass": "Burstable", "containerStatuses": [container]},
    })
}

fn reduced(memory_mib: Option<u64>) -> PodRequests {
    PodRequests::Reduced { memory_mib }
}

/// Returns the pod after the patches, as the API server stores it.
fn patched(mut pod: Value, patches: &ResizePatches) -> Value {
    for patch in [&patches.note, &patches.release].into_iter().flatten() {
        let note = &patch["metadata"]["annotations"][ORIGINAL_REQUESTS];
        pod["metadata"]["annotations"] = match note {
            Value::Null => json!({}),
            note => json!({ORIGINAL_REQUESTS: note}),
        };
    }
    for list in ["initContainers", "containers"] {
        for change in patches.resize.iter().flat_map(|it| fields::array_items(&it["spec"][list])) {
            let stored = pod["spec"][list].as_array_mut().into_iter().flatten();
            let stored = stored.filter(|it| it["name"] == change["name"]);
            for container in stored {
                for (resource, amount) in
                    change["resources"]["requests"].as_object().into_iter().flatten()
                {
                    container["resources"]["requests"][resource] = amount.clone();
                }
            }
        }
    }
    pod
}

fn resize(pod: &Value, requests: PodRequests) -> Value {
    patched(pod.clone(), &plan_resize(pod, requests).expect("it can be resized"))
}

/// Returns the requests of the container at this place of `spec.containers`.
fn requests_of(pod: &Value, index: usize) -> Value {
    pod["spec"]["containers"][index]["resources"]["requests"].clone()
}

#[test]
fn the_requests_are_noted_reduced_and_restored() {
    let created = pod(json!({"cpu": "500m", "memory": "256Mi"}));
    let patches = plan_resize(&created, reduced(Some(40))).expect("it can be resized");
    let note = json!({"user-container": {"cpu": "500m", "memory": "256Mi"}}).to_string();
    let note = json!({
        "metadata": {
            "uid": "u", "resourceVersion": "7", "annotations": {ORIGINAL_REQUESTS: note},
        },
    });
    let requests = json!({"cpu": "1m", "memory": "40Mi"});
    let resize_body = json!({
        "metadata": {"uid": "u"},
        "spec": {"containers": [{"name": "user-container", "resources": {"requests": requests}}]},
    });
    let expected = ResizePatches { note: Some(note), resize: Some(resize_body), release: None };
    assert_eq!(patches, expected);

    let frozen = patched(created.clone(), &patches);
    let again = plan_resize(&frozen, reduced(Some(40))).expect("it can be resized");
    assert_eq!(again, ResizePatches::default(), "nothing differs");
    let mut restored = resize(&frozen, PodRequests::Original);
    assert_eq!(restored["metadata"]["annotations"], json!({}));
    restored["metadata"]["annotations"].take();
    let mut expected = created;
    expected["metadata"]["annotations"].take();
    assert_eq!(restored, expected);
}

/// The next attempt may be that of another leader, which knows only the pod.
#[test]
fn an_attempt_that_ended_between_two_patches_is_continued() {
    let created = pod(json!({"cpu": "500m", "memory": "256Mi"}));
    let patches = plan_resize(&created, reduced(Some(40))).expect("it can be resized");
    let only_noted = patched(created.clone(), &ResizePatches { resize: None, ..patches.clone() });
    let next = plan_resize(&only_noted, reduced(Some(40))).expect("it can be resized");
    assert_eq!(next, ResizePatches { note: None, ..patches });
    let unneeded = plan_resize(&only_noted, PodRequests::Original).expect("it can be resized");
    assert_eq!((&unneeded.note, &unneeded.resize), (&None, &None));
    assert!(unneeded.release.is_some(), "only the note is left");

    let frozen = resize(&created, reduced(Some(40)));
    let restoring = plan_resize(&frozen, PodRequests::Original).expect("it can be resized");
    let not_released = patched(frozen, &ResizePatches { release: None, ..restoring });
    assert_eq!(requests_of(&not_released, 0), requests_of(&created, 0));
    let last = plan_resize(&not_released, PodRequests::Original).expect("it can be resized");
    assert!(last.resize.is_none() && last.release.is_some(), "{last:?}");
}

/// Otherwise the reduced requests would be noted as the original ones, and stay without limit.
#[test]
fn a_second_reduction_keeps_the_first_note() {
    let created = pod(json!({"cpu": "500m", "memory": "256Mi"}));
    let frozen = resize(&created, reduced(Some(40)));
    let reclaimed = plan_resize(&frozen, reduced(Some(8))).expect("it can be resized");
    assert_eq!(reclaimed.note, None);
    let reclaimed = patched(frozen, &reclaimed);
    assert_eq!(requests_of(&reclaimed, 0), json!({"cpu": "1m", "memory": "8Mi"}));
    let thawed = resize(&reclaimed, PodRequests::Original);
    assert_eq!(requests_of(&thawed, 0), requests_of(&created, 0));
}

#[test]
fn memory_is_never_above_its_original_request_and_never_zero() {
    let memory = |original: &str, memory_mib: Option<u64>| {
        let frozen = resize(&pod(json!({"cpu": "1", "memory": original})), reduced(memory_mib));
        requests_of(&frozen, 0)["memory"].as_str().map(str::to_owned)
    };
    assert_eq!(memory("64Mi", Some(63)).as_deref(), Some("63Mi"));
    assert_eq!(memory("64Mi", Some(64)).as_deref(), Some("64Mi"));
    assert_eq!(memory("64Mi", Some(900)).as_deref(), Some("64Mi"));
    assert_eq!(memory("1G", Some(100)).as_deref(), Some("100Mi"));
    assert_eq!(memory("64Mi", Some(0)).as_deref(), Some("1Mi"));
    assert_eq!(memory("64Mi", None).as_deref(), Some("64Mi"), "what is not known stays");
}

#[test]
fn memory_is_divided_among_the_containers_in_proportion() {
    let container =
        |name: &str, requests: Value| json!({"name": name, "resources": {"requests": requests}});
    let created = pod_of(json!({"containers": [
        container("a", json!({"cpu": "100m", "memory": "300Mi"})),
        container("b", json!({"cpu": "2", "memory": "100Mi"})),
        container("c", json!({"cpu": "2"})),
        container("d", json!({})),
    ]}));
    let frozen = resize(&created, reduced(Some(41)));
    let requests: Vec<Value> = (0..4).map(|at| requests_of(&frozen, at)).collect();
    let expected = [
        json!({"cpu": "1m", "memory": "31Mi"}),
        json!({"cpu": "1m", "memory": "11Mi"}),
        json!({"cpu": "1m"}),
        json!({}),
    ];
    assert_eq!(requests, expected);
}

#[test]
fn a_pod_without_anything_to_reduce_is_left_alone() {
    for requests in [json!({}), json!({"cpu": "1m"}), json!({"memory": "10Mi"})] {
        let patches = plan_resize(&pod(requests.clone()), reduced(Some(10)));
        assert_eq!(patches, Ok(ResizePatches::default()), "{requests}");
    }
    let patches = plan_resize(&pod(json!({"cpu": "1"})), PodRequests::Original);
    assert_eq!(patches, Ok(ResizePatches::default()), "it was never reduced");
}

/// The API server writes quantities in a form of its own.
#[test]
fn equal_amounts_in_another_form_are_not_written() {
    let mut frozen = pod(json!({"cpu": "0.001", "memory": "10485760"}));
    let note = json!({"user-container": {"cpu": "1", "memory": "20Mi"}}).to_string();
    frozen["metadata"]["annotations"] = json!({ORIGINAL_REQUESTS: note});
    let patches = plan_resize(&frozen, reduced(Some(10)));
    assert_eq!(patches, Ok(ResizePatches::default()));
}

#[test]
fn a_resource_whose_change_restarts_the_container_is_left_alone() {
    let mut created = pod(json!({"cpu": "1", "memory": "64Mi"}));
    let policies = |cpu: &str, memory: &str| {
        json!([
            {"resourceName": "cpu", "restartPolicy": cpu},
            {"resourceName": "memory", "restartPolicy": memory},
        ])
    };
    let mut requests = |cpu: &str, memory: &str| {
        created["spec"]["containers"][0]["resizePolicy"] = policies(cpu, memory);
        requests_of(&resize(&created, reduced(Some(10))), 0)
    };
    let (restart, keep) = ("RestartContainer", "NotRequired");
    assert_eq!(requests(keep, keep), json!({"cpu": "1m", "memory": "10Mi"}));
    assert_eq!(requests(keep, restart), json!({"cpu": "1m", "memory": "64Mi"}));
    assert_eq!(requests(restart, keep), json!({"cpu": "1", "memory": "10Mi"}));
    assert_eq!(requests(restart, restart), json!({"cpu": "1", "memory": "64Mi"}));
}

#[test]
fn sidecars_are_resized_and_other_init_containers_are_not() {
    let init = |name: &str, policy: Value| json!({"name": name, "restartPolicy": policy, "resources": {"requests": {"cpu": "1"}}});
    let created = pod_of(json!({
        "initContainers": [init("setup", Value::Null), init("proxy", json!("Always"))],
        "containers": [{"name": "user-container", "resources": {"requests": {"cpu": "1"}}}],
    }));
    let patches = plan_resize(&created, reduced(None)).expect("it can be resized");
    let body = patches.resize.expect("something is reduced");
    let spec = &body["spec"];
    let named = |list: &str| {
        fields::array_items(&spec[list]).map(|it| it["name"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(named("initContainers"), [json!("proxy")]);
    assert_eq!(named("containers"), [json!("user-container")]);
}

#[test]
fn a_pod_that_no_resize_can_reduce_is_refused_with_the_reason() {
    let created = pod(json!({"cpu": "1", "memory": "64Mi"}));
    let mut guaranteed = created.clone();
    guaranteed["status"]["qosClass"] = json!("Guaranteed");
    let mut pod_level = created.clone();
    pod_level["spec"]["resources"] = json!({"requests": {"cpu": "2"}});
    let mut old_kubelet = created.clone();
    old_kubelet["status"]["containerStatuses"][0]["resources"].take();
    for (pod, word) in
        [(guaranteed, "Guaranteed"), (pod_level, "spec.resources"), (old_kubelet, "kubelet")]
    {
        let error = plan_resize(&pod, reduced(Some(10))).expect_err("it is refused");
        assert_eq!(error.reason, RESIZE_UNSUPPORTED);
        assert!(error.message.contains(word), "{}", error.message);
        assert_eq!(plan_resize(&pod, PodRequests::Original), Ok(ResizePatches::default()));
    }
}

/// A kubelet may not have reported the resources of a container that starts again.
#[test]
fn requests_are_restored_whatever_the_node_reports() {
    let created = pod(json!({"cpu": "1", "memory": "64Mi"}));
    let mut frozen = resize(&created, reduced(Some(10)));
    frozen["status"]["containerStatuses"][0]["resources"].take();
    let thawed = resize(&frozen, PodRequests::Original);
    assert_eq!(requests_of(&thawed, 0), requests_of(&created, 0));
}

#[test]
fn a_note_that_is_not_readable_changes_nothing_and_is_reported() {
    for note in ["", "{", "[]", r#"{"a": {"cpu": "many"}}"#, r#"{"a": {"gpu": "1"}}"#] {
        let mut frozen = pod(json!({"cpu": "1m"}));
        frozen["metadata"]["annotations"] = json!({ORIGINAL_REQUESTS: note});
        for requests in [PodRequests::Original, reduced(None)] {
            let error = plan_resize(&frozen, requests).expect_err("it is refused");
            assert_eq!(error.reason, "ResizeNoteUnreadable", "{note}");
        }
    }
}

#[test]
fn a_pod_that_ends_is_left_alone() {
    let mut frozen = resize(&pod(json!({"cpu": "1"})), reduced(None));
    frozen["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    for requests in [PodRequests::Original, reduced(Some(1))] {
        assert_eq!(plan_resize(&frozen, requests), Ok(ResizePatches::default()));
    }
}
