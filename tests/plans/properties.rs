//! Tests of the properties of every plan, with random plans.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use muster::transfer::plan::{
    BufferRole, DeviceId, Partition, PlacedDevice, Plan, ShardRegion, Step, StepClass, TaskId, pack_runs,
    unpack_runs,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::support::{PlanCase, RandomChoices, asked, elements, expected_shards, run_offsets, zeroed_shards};

fn random_decision_bytes() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..160)
}

fn case_and_plan_from_bytes(bytes: &[u8]) -> (PlanCase, Plan) {
    let asked = asked(&mut RandomChoices::of(bytes));
    let plan = asked.plan();
    (asked, plan)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn a_plan_carried_out_gives_what_gathering_and_cutting_again_gives(bytes in random_decision_bytes()) {
        let (asked, plan) = case_and_plan_from_bytes(&bytes);
        let mut found = zeroed_shards(&plan);
        plan.execute(&expected_shards(&asked.source), &mut found).expect("the shards fit");
        prop_assert_eq!(found, expected_shards(&asked.destination));
    }

    #[test]
    fn packing_and_unpacking_every_step_gives_the_same(bytes in random_decision_bytes()) {
        let (asked, plan) = case_and_plan_from_bytes(&bytes);
        let source = expected_shards(&asked.source);
        let mut found = zeroed_shards(&plan);
        for step in plan.steps() {
            let mut packed = vec![0; step.bytes as usize];
            let shards = if step.source.buffer == BufferRole::Source { &source } else { &found };
            pack_runs(&shards[&step.source.device], &step.source.runs, &mut packed).expect("the runs fit");
            let shard = found.get_mut(&step.destination.device).expect("it has a shard");
            unpack_runs(&packed, &step.destination.runs, shard).expect("the runs fit");
        }
        prop_assert_eq!(found, expected_shards(&asked.destination));
    }

    #[test]
    fn every_byte_is_written_once_and_read_only_when_it_is_there(bytes in random_decision_bytes()) {
        let (_, plan) = case_and_plan_from_bytes(&bytes);
        let mut written: BTreeMap<DeviceId, Vec<bool>> =
            zeroed_shards(&plan).into_iter().map(|(device, shard)| (device, vec![false; shard.len()])).collect();
        let mut steps: Vec<Step> = Vec::new();
        for step in plan.steps() {
            let all = |runs| run_offsets(runs).into_iter().flat_map(|at| at..at + runs.run_bytes);
            prop_assert_eq!(step.bytes, all(&step.source.runs).count() as u64);
            if step.source.buffer == BufferRole::Destination {
                let before = &steps[step.after.expect("somebody must have written it") as usize];
                prop_assert_eq!(before.destination.device, step.source.device);
                prop_assert_eq!(&before.destination.region, &step.source.region);
                prop_assert!(all(&step.source.runs).all(|at| written[&step.source.device][at as usize]));
            } else {
                prop_assert_eq!(step.after, None);
            }
            let shard = written.get_mut(&step.destination.device).expect("it has a shard");
            for at in all(&step.destination.runs) {
                prop_assert!(!std::mem::replace(&mut shard[at as usize], true), "byte {} is written twice", at);
            }
            steps.push(step);
        }
        prop_assert!(written.values().flatten().all(|&written| written), "a byte is never written");
    }

    #[test]
    fn no_plan_could_move_less(bytes in random_decision_bytes()) {
        let (asked, plan) = case_and_plan_from_bytes(&bytes);
        let cost = plan.cost();
        let least = least(&asked);
        let of = |class: StepClass| cost.classes.iter().find(|cost| cost.class == class).expect("it is there").bytes;
        let found = [StepClass::SameBuffer, StepClass::LocalCopy, StepClass::SameHost, StepClass::AcrossHosts].map(of);
        prop_assert_eq!(found, least);
        prop_assert_eq!(
            [cost.minimum.local_copy, cost.minimum.same_host, cost.minimum.across_hosts],
            [least[1], least[2], least[3]]
        );
        prop_assert_eq!(cost.over_minimum, 0);
        prop_assert_eq!(cost.moved, least[1..].iter().sum::<u64>());
    }

    #[test]
    fn steps_say_truly_who_how_far_and_in_which_order(bytes in random_decision_bytes()) {
        let (asked, plan) = case_and_plan_from_bytes(&bytes);
        let owners: HashMap<DeviceId, &PlacedDevice> =
            asked.placement.devices.iter().map(|placed| (placed.device, placed)).collect();
        let mut keys = HashSet::new();
        for (number, step) in plan.steps().enumerate() {
            prop_assert_eq!(step.index as usize, number);
            prop_assert!(step.after.is_none_or(|after| after < step.index));
            prop_assert!(keys.insert(step.key), "two steps have one key");
            for side in [&step.source, &step.destination] {
                prop_assert_eq!((side.task, &side.host), (owners[&side.device].task, &owners[&side.device].host));
                prop_assert_eq!(plan.shard_shape(side.buffer, side.device), Some(side.shape.clone()));
            }
            let same_device = step.source.device == step.destination.device;
            let whole = step.source.shape == step.source.region.extent && step.destination.shape == step.source.region.extent;
            let class = if same_device && whole {
                StepClass::SameBuffer
            } else if step.source.task == step.destination.task {
                StepClass::LocalCopy
            } else if step.source.host == step.destination.host {
                StepClass::SameHost
            } else {
                StepClass::AcrossHosts
            };
            prop_assert_eq!(step.class, class);
            prop_assert_eq!(plan.step(step.index), Some(step));
        }
        prop_assert_eq!(plan.step(plan.len() as u32), None);
    }

    #[test]
    fn regions_of_a_buffer_have_places_of_their_own_in_its_room(bytes in random_decision_bytes()) {
        let (asked, plan) = case_and_plan_from_bytes(&bytes);
        let mut used: BTreeMap<_, Vec<(u64, u64, ShardRegion)>> = BTreeMap::new();
        let mut arrivals = HashSet::new();
        let steps: Vec<Step> = plan.steps().collect();
        for step in &steps {
            for side in [&step.source, &step.destination] {
                if let Some(room) = side.staging {
                    prop_assert!(step.class.leaves_task());
                    prop_assert_eq!(room.bytes, step.bytes);
                    prop_assert!(room.offset + room.bytes <= plan.shard_bytes(side.buffer, side.device));
                    let place = (room.offset, room.offset + room.bytes, side.region.clone());
                    used.entry((side.device, side.buffer)).or_default().push(place);
                } else if step.class.leaves_task() {
                    let long = side.runs.count() <= 1 || side.runs.run_bytes >= 4096;
                    prop_assert!(long, "short runs without room: {:?}", side.runs);
                }
            }
            // Bytes that are passed on are sent from where they arrived, and nothing else arrives there.
            if let (true, Some(after)) = (step.class.leaves_task(), step.after) {
                prop_assert_eq!(step.source.staging, steps[after as usize].destination.staging);
            }
            if let Some(room) = step.destination.staging {
                prop_assert!(arrivals.insert((step.destination.device, room.offset)));
            }
        }
        let mut needed: BTreeMap<TaskId, u64> = BTreeMap::new();
        for (&(device, buffer), places) in &used {
            for (number, one) in places.iter().enumerate() {
                for other in &places[..number] {
                    let apart = one.1 <= other.0 || other.1 <= one.0;
                    prop_assert!(apart || one == other, "two regions share room: {:?}, {:?}", one, other);
                }
            }
            let owner = asked.placement.devices.iter().find(|placed| placed.device == device).expect("it is placed");
            *needed.entry(owner.task).or_default() += plan.shard_bytes(buffer, device);
        }
        for &task in plan.tasks() {
            prop_assert_eq!(plan.staging_bytes(task), needed.get(&task).copied().unwrap_or(0));
        }
        let most = plan.cost().most_staging.map(|most| (most.bytes, needed[&most.task]));
        prop_assert_eq!(most, needed.values().max().map(|most| (*most, *most)));
    }

    #[test]
    fn a_task_sees_its_steps_of_the_plan_in_their_order_and_no_others(bytes in random_decision_bytes()) {
        let (asked, plan) = case_and_plan_from_bytes(&bytes);
        for task in asked.placement.devices.iter().map(|placed| placed.task).chain([TaskId(77)]) {
            let own = plan.steps().filter(|step| step.source.task == task || step.destination.task == task);
            prop_assert!(plan.steps_of_task(task).eq(own));
        }
    }

    #[test]
    fn the_cost_is_what_the_steps_come_to(bytes in random_decision_bytes()) {
        let (_, plan) = case_and_plan_from_bytes(&bytes);
        let (mut pairs, mut goes, mut comes) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut depths: Vec<u64> = Vec::new();
        for step in plan.steps() {
            depths.push(1 + step.after.map_or(0, |after| depths[after as usize]));
            if step.class.leaves_task() {
                let (steps, bytes) = pairs.entry((step.source.task, step.destination.task)).or_insert((0, 0));
                (*steps, *bytes) = (*steps + 1, *bytes + step.bytes);
                *goes.entry(step.source.task).or_insert(0) += step.bytes;
                *comes.entry(step.destination.task).or_insert(0) += step.bytes;
            }
        }
        let told: Vec<_> = plan.pairs().iter().map(|pair| ((pair.from, pair.to), (pair.steps, pair.bytes))).collect();
        prop_assert_eq!(told, pairs.into_iter().collect::<Vec<_>>());
        let cost = plan.cost();
        prop_assert_eq!(cost.rounds, depths.into_iter().max().unwrap_or(0));
        for (told, all) in [(cost.busiest_out, goes), (cost.busiest_in, comes)] {
            prop_assert_eq!(told.map(|told| told.bytes), all.values().max().copied());
            prop_assert_eq!(told.map(|told| told.bytes), told.map(|told| all[&told.task]));
        }
    }

    #[test]
    fn plans_do_not_depend_on_the_form_of_the_input(bytes in random_decision_bytes(), order in vec(any::<u8>(), 64)) {
        let (asked, plan) = case_and_plan_from_bytes(&bytes);
        let told = describe_equivalently(&asked, &mut RandomChoices::of(&order));
        let other = told.plan();
        prop_assert_eq!(plan.layout_fingerprint(), other.layout_fingerprint());
        prop_assert_eq!(plan.fingerprint(), other.fingerprint());
        let (mine, theirs): (Vec<Step>, Vec<Step>) = (plan.steps().collect(), other.steps().map(with_original_host_names).collect());
        prop_assert_eq!(mine, theirs);
        prop_assert_eq!(plan.cost(), other.cost());
        // A task's steps are those in which it takes part, and both ends of a step have the same step.
        let mut seen: BTreeMap<u32, usize> = BTreeMap::new();
        for &task in plan.tasks() {
            for step in plan.steps_of_task(task) {
                prop_assert!(step.source.task == task || step.destination.task == task);
                prop_assert_eq!(plan.step(step.index), Some(step.clone()));
                *seen.entry(step.index).or_default() += 1;
            }
        }
        for step in plan.steps() {
            prop_assert_eq!(seen[&step.index], if step.source.task == step.destination.task { 1 } else { 2 });
        }
    }

    #[test]
    fn a_change_that_matters_changes_the_fingerprint(bytes in random_decision_bytes()) {
        let (asked, plan) = case_and_plan_from_bytes(&bytes);
        let mut moved = asked.clone();
        // Two devices that hold different parts swap places.
        let held = elements(&asked.destination);
        let devices = &mut moved.destination.sharding.mesh.devices;
        let other = devices.iter().position(|device| held[device] != held[&devices[0]]);
        if let Some(other) = other {
            devices.swap(0, other);
            prop_assert_ne!(plan.layout_fingerprint(), moved.plan().layout_fingerprint());
        }
        let mut placed = asked.clone();
        let used: BTreeSet<DeviceId> = plan.placement().devices.iter().map(|placed| placed.device).collect();
        let one = placed.placement.devices.iter_mut().find(|device| used.contains(&device.device)).expect("one is used");
        (one.task, one.host) = (TaskId(99), "elsewhere".to_owned());
        prop_assert_eq!(plan.layout_fingerprint(), placed.plan().layout_fingerprint());
        prop_assert_ne!(plan.fingerprint(), placed.plan().fingerprint());
    }

    #[test]
    fn a_plan_read_from_its_text_is_the_same_plan(bytes in random_decision_bytes()) {
        let (_, plan) = case_and_plan_from_bytes(&bytes);
        let text = plan.to_json().expect("it is short");
        let read = Plan::from_json(&text).expect("it is a plan");
        prop_assert_eq!(read.to_json().expect("it is short"), text);
        prop_assert!(plan.steps().eq(read.steps()));
        prop_assert_eq!(plan.fingerprint(), read.fingerprint());
    }
}

/// Computes the fewest bytes by class, element by element: those that stay, are copied in a task, come from
/// another task, and come from another host.
fn least(asked: &PlanCase) -> [u64; 4] {
    let item = asked.source.dtype.bytes().expect("whole bytes");
    let owners: HashMap<DeviceId, (TaskId, &str)> = asked
        .placement
        .devices
        .iter()
        .map(|placed| (placed.device, (placed.task, placed.host.as_str())))
        .collect();
    let (source, destination) = (elements(&asked.source), elements(&asked.destination));
    let (mut task_has, mut host_has) = (HashSet::new(), HashSet::new());
    for (device, numbers) in &source {
        for number in numbers {
            task_has.insert((owners[device].0, number));
            host_has.insert((owners[device].1, number));
        }
    }
    let (mut task_wants, mut host_wants) = (HashSet::new(), HashSet::new());
    let (mut all, mut stays) = (0, 0);
    for (device, numbers) in &destination {
        all += numbers.len();
        if source.get(device) == Some(numbers) {
            stays += numbers.len();
        }
        for number in numbers {
            task_wants.insert((owners[device].0, number));
            host_wants.insert((owners[device].1, number));
        }
    }
    let across = host_wants.difference(&host_has).count();
    let leaving = task_wants.difference(&task_has).count();
    [stays, all - stays - leaving, leaving - across, across].map(|elements| elements as u64 * item)
}

/// Returns an equivalent description: mesh axes in another order and with other names, the placement in
/// another order, other names of hosts, unused devices, and other notations of entries.
fn describe_equivalently(asked: &PlanCase, choices: &mut RandomChoices) -> PlanCase {
    let mut told = asked.clone();
    for array in [&mut told.source, &mut told.destination] {
        let (mesh, spec) = (&mut array.sharding.mesh, &mut array.sharding.spec);
        let turn = choices.number_below(mesh.axes.len().max(1));
        // The last axes become the first ones, and the grid of devices is transposed with them.
        let (slow, fast): (u64, u64) = (
            mesh.axes[..turn].iter().map(|axis| axis.size).product(),
            mesh.axes[turn..].iter().map(|axis| axis.size).product(),
        );
        mesh.axes.rotate_left(turn);
        let old = mesh.devices.clone();
        mesh.devices =
            (0..fast).flat_map(|f| (0..slow).map(move |s| s * fast + f)).map(|at| old[at as usize]).collect();
        for axis in &mut mesh.axes {
            axis.name.push('2');
        }
        for entry in &mut spec.0 {
            *entry = Partition::Axes(entry.axes().iter().map(|axis| format!("{axis}2")).collect());
        }
        spec.0.resize(array.shape.len(), Partition::Whole);
    }
    for placed in &mut told.placement.devices {
        placed.host = format!("other {}", placed.host);
    }
    let idle =
        |device| PlacedDevice { device: DeviceId(device), task: TaskId(device), host: "idle".to_owned() };
    told.placement.devices.extend((1000..1003).map(idle));
    let at = choices.number_below(told.placement.devices.len());
    told.placement.devices.rotate_left(at);
    told.placement.devices.reverse();
    told
}

/// Returns the step with the original names of hosts.
fn with_original_host_names(mut step: Step) -> Step {
    for side in [&mut step.source, &mut step.destination] {
        side.host = side.host.trim_start_matches("other ").to_owned();
    }
    step
}
