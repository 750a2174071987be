//! Encodes successful replies for both generations.
//!
//! A reply that many callers share (a live set, task states, devices) is encoded only once for all callers that
//! need the same encoding (`encoded_replies.rs`). Large values are shared and not copied. Begin at `encode_reply`.

use bytes::{Bytes, BytesMut};
use prost::encoding::{encode_varint, encoded_len_varint};

use super::decoded_call::{ReplyFormat, ReplyKind};
use super::dialect::Dialect;
use super::encoded_replies::EncodedReplyCache;
use super::frame::{
    COPY_MAX, MessageBuilder, MessageChunks, PREFIX_LEN, encode_framed_message, encode_short_framed_message,
};
use super::status::to_coordinated_task;
use crate::coordination::{
    ClientTaskState, DirectoryListing, LiveSet, Reply, ServiceIncarnation, TaskInfo, TaskStates,
};
use crate::proto::{tensorflow, xla::coordination};

/// A response without contents.
static EMPTY: [u8; PREFIX_LEN] = [0; PREFIX_LEN];

/// Encodes the body of a response; returns the length if it exceeds `most` bytes.
pub(super) fn encode_reply(
    reply: &Reply,
    form: &ReplyFormat,
    replies: &EncodedReplyCache,
    most: usize,
) -> Result<MessageChunks, usize> {
    let dialect = form.dialect;
    Ok(MessageChunks::One(match reply {
        Reply::Done => Bytes::from_static(&EMPTY),
        Reply::ServiceIncarnation(ServiceIncarnation(service_incarnation)) => {
            // The field has the same number in every response that carries it, in both generations.
            let reply = coordination::HeartbeatResponse { service_incarnation: *service_incarnation };
            return Ok(encode_short_framed_message(&reply));
        }
        Reply::BarrierPassed(counter) => {
            return Ok(encode_short_framed_message(&coordination::BarrierResponse { counter: *counter }));
        }
        Reply::Value(value) => return Ok(encode_key_value(&form.key, value)),
        Reply::Directory(entries) => return encode_directory(entries, most),
        Reply::LiveSet(set) => replies.get_or_encode(set, dialect, |set| encode_live_set(set, dialect)),
        Reply::States(states) if form.kind == ReplyKind::Unversioned => {
            encode_framed_message(&tensorflow::GetTaskStateResponse {
                task_state: encode_generation_a_states(states, dialect),
            })
        }
        Reply::States(states) => {
            replies.get_or_encode(states, dialect, |states| encode_task_states(states, dialect))
        }
        Reply::Devices(incarnation, devices) => {
            replies.get_or_encode(devices, dialect, |devices| encode_devices(*incarnation, devices))
        }
    }))
}

/// Returns the length of a bytes field with a tag of one byte.
fn bytes_field_length(length: usize) -> usize {
    1 + encoded_len_varint(length as u64) + length
}

fn put_field_header(buffer: &mut BytesMut, tag: u8, length: usize) {
    buffer.extend_from_slice(&[tag]);
    encode_varint(length as u64, buffer);
}

const FIRST_FIELD: u8 = 1 << 3 | 2;
const SECOND_FIELD: u8 = 2 << 3 | 2;

fn key_value_entry_length(key: &Bytes, value: &Bytes) -> usize {
    [key, value].iter().filter(|part| !part.is_empty()).map(|part| bytes_field_length(part.len())).sum()
}

/// Appends a `KeyValueEntry` under the tag `tag`.
fn put_key_value_entry(answer: &mut MessageBuilder, tag: u8, key: &Bytes, value: &Bytes) {
    put_field_header(answer.small_parts_buffer(), tag, key_value_entry_length(key, value));
    for (tag, part) in [(FIRST_FIELD, key), (SECOND_FIELD, value)] {
        if !part.is_empty() {
            put_field_header(answer.small_parts_buffer(), tag, part.len());
            answer.put(part);
        }
    }
}

fn encode_key_value(key: &Bytes, value: &Bytes) -> MessageChunks {
    let mut answer = MessageBuilder::new(bytes_field_length(key_value_entry_length(key, value)));
    put_key_value_entry(&mut answer, FIRST_FIELD, key, value);
    answer.finish()
}

/// Returns the bytes that the answer with these entries copies; large values are shared with the store.
pub(super) fn directory_reply_copied_bytes(entries: &DirectoryListing) -> usize {
    let copied = |key: &Bytes, value: &Bytes| {
        let shared = if value.len() > COPY_MAX { value.len() } else { 0 };
        bytes_field_length(key_value_entry_length(key, value)) - shared
    };
    entries.iter().map(|(key, value)| copied(key, value)).sum()
}

fn encode_directory(entries: &DirectoryListing, most: usize) -> Result<MessageChunks, usize> {
    let length =
        entries.iter().map(|(key, value)| bytes_field_length(key_value_entry_length(key, value))).sum();
    if length > most {
        return Err(length);
    }
    let mut answer = MessageBuilder::new(length);
    for (key, value) in entries.iter() {
        put_key_value_entry(&mut answer, SECOND_FIELD, key, value);
    }
    Ok(answer.finish())
}

fn encode_live_set(set: &LiveSet, dialect: Dialect) -> Bytes {
    let incarnations = set.iter().map(|(_, incarnation)| incarnation.0).collect();
    let ids = set.iter().map(|(task, _)| task.0);
    match dialect {
        Dialect::Number => encode_framed_message(&coordination::GetAliveTasksResponse {
            alive_task_ids: ids.collect(),
            incarnations,
        }),
        Dialect::Named | Dialect::Unnamed => encode_framed_message(&tensorflow::GetAliveTasksResponse {
            alive_tasks: ids.map(|id| to_coordinated_task(id, dialect)).collect(),
            incarnations,
        }),
    }
}

fn encode_task_states(states: &TaskStates, dialect: Dialect) -> Bytes {
    let version_number = states.version;
    match dialect {
        Dialect::Number => {
            let task_state = states.tasks.iter().map(encode_generation_c_state).collect();
            encode_framed_message(&coordination::WatchTasksResponse { task_state, version_number })
        }
        Dialect::Named | Dialect::Unnamed => {
            let task_state = encode_generation_a_states(states, dialect);
            encode_framed_message(&tensorflow::WatchJobStateResponse { task_state, version_number })
        }
    }
}

/// Returns the number of a state, which is the same in generation A.
fn task_state_number(state: ClientTaskState) -> i32 {
    (match state {
        ClientTaskState::Disconnected => coordination::TaskState::Disconnected,
        ClientTaskState::Connected => coordination::TaskState::Connected,
        ClientTaskState::Error => coordination::TaskState::Error,
    }) as i32
}

/// Returns the task that caused the error of `info`, where it is known; otherwise the task itself.
fn error_source_task(info: &TaskInfo) -> Option<i32> {
    let error = info.error.as_ref()?;
    Some(error.service_error.and_then(|error| error.source).unwrap_or(info.task).0)
}

fn encode_generation_c_state(info: &TaskInfo) -> coordination::TaskInfo {
    coordination::TaskInfo {
        task_id: info.task.0,
        state: task_state_number(info.state),
        error_code: info.error.as_ref().map_or(0, |error| error.code.number()),
        error_message: info.error.as_ref().map(|error| error.message.clone()).unwrap_or_default(),
        error_payload: error_source_task(info).map(|source_task_id| coordination::CoordinationServiceError {
            is_reported_error: false,
            source_task_id,
        }),
        incarnation: info.incarnation.0,
    }
}

fn encode_generation_a_states(
    states: &TaskStates,
    dialect: Dialect,
) -> Vec<tensorflow::CoordinatedTaskStateInfo> {
    let named = |info: &TaskInfo| tensorflow::CoordinatedTaskStateInfo {
        task: Some(to_coordinated_task(info.task.0, dialect)),
        state: task_state_number(info.state),
        error_code: info.error.as_ref().map_or(0, |error| error.code.number()),
        error_message: info.error.as_ref().map(|error| error.message.clone()).unwrap_or_default(),
        error_payload: error_source_task(info).map(|source| tensorflow::CoordinationServiceError {
            is_reported_error: false,
            source_task: Some(to_coordinated_task(source, dialect)),
        }),
        incarnation: info.incarnation.0,
    };
    states.tasks.iter().map(named).collect()
}

/// The devices are encoded already, so the message is assembled by hand.
fn encode_devices(incarnation: ServiceIncarnation, devices: &[Bytes]) -> Bytes {
    const INCARNATION: u8 = 1 << 3 | 1;
    const DEVICES: u8 = 4 << 3 | 2;
    let inner: usize = devices.iter().map(|device| bytes_field_length(device.len())).sum();
    let length = 9 + bytes_field_length(inner);
    let mut framed = BytesMut::with_capacity(PREFIX_LEN + length);
    framed.extend_from_slice(&[0]);
    framed.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    framed.extend_from_slice(&[INCARNATION]);
    framed.extend_from_slice(&incarnation.0.to_le_bytes());
    put_field_header(&mut framed, DEVICES, inner);
    for device in devices {
        put_field_header(&mut framed, FIRST_FIELD, device.len());
        framed.extend_from_slice(device);
    }
    framed.freeze()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prost::Message as _;

    use super::*;
    use crate::coordination::{Code, Failure, Request, TaskId, TaskIncarnation};
    use crate::grpc::decoded_call::DecodedCall;
    use crate::proto::CoordinatedTask;

    fn reply_format(dialect: Dialect) -> ReplyFormat {
        DecodedCall::new(dialect, None, Request::JobState).with_echoed_key(Bytes::from_static(b"/a//b")).form
    }

    fn check_prefix_and_join(parts: MessageChunks) -> Vec<u8> {
        let whole = match parts {
            MessageChunks::Short(message) => message.bytes().to_vec(),
            MessageChunks::One(part) => part.to_vec(),
            MessageChunks::Many(parts) => parts.concat(),
        };
        let length = u32::from_be_bytes(whole[1..PREFIX_LEN].try_into().unwrap()) as usize;
        assert_eq!((whole[0], length), (0, whole.len() - PREFIX_LEN));
        whole[PREFIX_LEN..].to_vec()
    }

    fn encode_without_cache(reply: &Reply, form: &ReplyFormat, most: usize) -> Result<MessageChunks, usize> {
        encode_reply(reply, form, &EncodedReplyCache::default(), most)
    }

    fn encode_and_decode_reply<M: prost::Message + Default>(reply: &Reply, form: &ReplyFormat) -> M {
        M::decode(check_prefix_and_join(encode_without_cache(reply, form, 1 << 30).unwrap()).as_slice())
            .unwrap()
    }

    #[test]
    fn values_repeat_the_callers_spelling() {
        for value in [Bytes::new(), Bytes::from_static(b"v"), vec![5; 100_000].into()] {
            let reply = Reply::Value(value.clone());
            let answer: coordination::GetKeyValueResponse =
                encode_and_decode_reply(&reply, &reply_format(Dialect::Number));
            let kv = coordination::KeyValueEntry { key: "/a//b".into(), value };
            assert_eq!(answer.kv, Some(kv.clone()));
            let same = coordination::GetKeyValueResponse { kv: Some(kv) }.encode_to_vec();
            assert_eq!(
                check_prefix_and_join(
                    encode_without_cache(&reply, &reply_format(Dialect::Number), 0).unwrap()
                ),
                same
            );
        }
    }

    #[test]
    fn directories() {
        let entries: Vec<(Bytes, Bytes)> =
            (0..50).map(|n| (format!("a/{n:02}").into(), vec![n; usize::from(n) * 400].into())).collect();
        let answer: tensorflow::GetKeyValueDirResponse = encode_and_decode_reply(
            &Reply::Directory(entries.iter().cloned().collect()),
            &reply_format(Dialect::Unnamed),
        );
        assert_eq!(answer.directory_key, "");
        let back: Vec<_> = answer.kv.into_iter().map(|kv| (Bytes::from(kv.key), kv.value)).collect();
        assert_eq!(back, entries);
        let empty: tensorflow::GetKeyValueDirResponse = encode_and_decode_reply(
            &Reply::Directory(std::iter::empty().collect()),
            &reply_format(Dialect::Unnamed),
        );
        assert_eq!(empty.kv, []);
        assert!(
            encode_without_cache(
                &Reply::Directory(entries.into_iter().collect()),
                &reply_format(Dialect::Number),
                1000
            )
            .is_err()
        );
    }

    #[test]
    fn live_sets_are_encoded_once_a_dialect() {
        let set = vec![(TaskId(0), TaskIncarnation(7)), (TaskId(3), TaskIncarnation(9))];
        let replies = EncodedReplyCache::default();
        let reply = Reply::LiveSet(Arc::new(set));
        let c: coordination::GetAliveTasksResponse =
            encode_and_decode_reply(&reply, &reply_format(Dialect::Number));
        assert_eq!((c.alive_task_ids, c.incarnations), (vec![0, 3], vec![7, 9]));
        for (dialect, named) in [(Dialect::Named, true), (Dialect::Unnamed, false)] {
            let a: tensorflow::GetAliveTasksResponse =
                encode_and_decode_reply(&reply, &reply_format(dialect));
            let tasks = [0, 3].map(|task_id| CoordinatedTask { named, task_id, recoverable: false });
            assert_eq!((a.alive_tasks, a.incarnations), (tasks.to_vec(), vec![7, 9]));
            let [one, two] =
                [(); 2].map(|()| match encode_reply(&reply, &reply_format(dialect), &replies, 0) {
                    Ok(MessageChunks::One(part)) => part.as_ptr(),
                    other => panic!("{other:?}"),
                });
            assert_eq!(one, two);
        }
    }

    #[test]
    fn states_with_and_without_version() {
        let error = Failure::without_details(Code::Other(77), "gone").with_source(TaskId(4));
        let reported = TaskInfo {
            task: TaskId(1),
            state: ClientTaskState::Error,
            incarnation: TaskIncarnation(8),
            error: Some(Arc::new(error)),
        };
        let fine = TaskInfo {
            task: TaskId(2),
            state: ClientTaskState::Connected,
            incarnation: TaskIncarnation(9),
            error: None,
        };
        let reply = Reply::States(Arc::new(TaskStates { version: 12, tasks: vec![reported, fine] }));
        let c: coordination::WatchTasksResponse =
            encode_and_decode_reply(&reply, &reply_format(Dialect::Number));
        assert_eq!(c.version_number, 12);
        assert_eq!((c.task_state[0].error_code, c.task_state[0].state), (77, 4));
        assert_eq!(c.task_state[0].error_payload.map(|payload| payload.source_task_id), Some(4));
        assert_eq!((c.task_state[1].incarnation, c.task_state[1].state), (9, 3));
        assert_eq!(c.task_state[1].error_payload, None);

        let a: tensorflow::WatchJobStateResponse =
            encode_and_decode_reply(&reply, &reply_format(Dialect::Named));
        assert_eq!((a.version_number, a.task_state.len()), (12, 2));
        let unversioned = ReplyFormat { kind: ReplyKind::Unversioned, ..reply_format(Dialect::Named) };
        let plain: tensorflow::WatchJobStateResponse = encode_and_decode_reply(&reply, &unversioned);
        assert_eq!(plain.version_number, 0);
        assert_eq!(plain.task_state, a.task_state);
    }

    #[test]
    fn small_answers() {
        let service: tensorflow::RegisterTaskResponse = encode_and_decode_reply(
            &Reply::ServiceIncarnation(ServiceIncarnation(5)),
            &reply_format(Dialect::Named),
        );
        assert_eq!(service.leader_incarnation, 5);
        let passed: tensorflow::BarrierResponse =
            encode_and_decode_reply(&Reply::BarrierPassed(3), &reply_format(Dialect::Named));
        assert_eq!(passed.counter, 3);
        assert!(
            check_prefix_and_join(
                encode_without_cache(&Reply::Done, &reply_format(Dialect::Number), 0).unwrap()
            )
            .is_empty()
        );
        let any = prost_types::Any { type_url: "t".into(), value: vec![1, 2] };
        let devices = Arc::new(vec![Bytes::from(any.encode_to_vec()), Bytes::from(any.encode_to_vec())]);
        let answer: tensorflow::WaitForAllTasksResponse = encode_and_decode_reply(
            &Reply::Devices(ServiceIncarnation(6), devices),
            &reply_format(Dialect::Unnamed),
        );
        assert_eq!(answer.leader_incarnation, 6);
        assert_eq!(answer.device_info.map(|info| info.device), Some(vec![any.clone(), any]));
    }
}
