//! Decodes and answers the method of the gRPC service `muster.v1.Stacks`, by which a worker sends what it is doing.
//!
//! `service/stacks/` has the rules. An answer is routed to its job like every other call. Begin at
//! [`accept_stack_answer`].

use prost::{DecodeError, Message as _};

use crate::coordination::{Code, Failure, JobId, TaskId, TaskIncarnation};
use crate::engine::Engine;
use crate::proto::MessageFields;
use crate::proto::muster::v1 as pb;
use crate::service::stacks::{
    FRAMES_MAX, InvalidStackAnswer, StackAnswerRefusal, StackCollector, StackFrame, THREADS_MAX, ThreadStack,
    WORKER_ANSWER_BYTES_MAX,
};

/// The service's name on the wire.
pub(super) const SERVICE: &str = "muster.v1.Stacks";
/// Its only method.
pub(super) const METHOD: &str = "Answer";

/// The number of the field with the threads.
const THREADS_TAG: u32 = 4;
/// The number of the field of frames in a thread.
const FRAMES_TAG: u32 = 3;

/// Accepts the answer in `message`.
pub(super) fn accept_stack_answer(
    engine: &Engine,
    stacks: &StackCollector,
    job: JobId,
    message: &[u8],
) -> Result<pb::StackAnswerAck, Failure> {
    let accepted = decode_stack_answer(message).and_then(|(answer, threads)| {
        let asked = (answer.request, task_id(answer.task), TaskIncarnation(answer.incarnation));
        stacks.accept_worker_answer(engine, job, asked, threads)
    });
    match accepted {
        Ok(()) => Ok(pb::StackAnswerAck {}),
        Err(refusal) => Err(Failure::without_details(refusal_code(&refusal), refusal.to_string())),
    }
}

/// Returns a task number of the wire; one that is too large is that of no task.
fn task_id(task: u32) -> TaskId {
    TaskId(i32::try_from(task).unwrap_or(-1))
}

/// Returns the number of threads, and the number of frames of the thread that has most. They are counted before memory is
/// allocated for them: an empty thread takes two bytes of a message.
fn count_threads_and_frames(message: &[u8]) -> Result<(usize, usize), DecodeError> {
    let (mut threads, mut most_frames) = (0, 0);
    for field in MessageFields::new(message) {
        let field = field?;
        let Some(thread) = field.contents.filter(|_| field.tag == THREADS_TAG) else { continue };
        threads += 1;
        let mut frames = 0;
        for field in MessageFields::new(thread) {
            frames += usize::from(field?.tag == FRAMES_TAG);
        }
        most_frames = most_frames.max(frames);
    }
    Ok((threads, most_frames))
}

fn decode_stack_answer(message: &[u8]) -> Result<(pb::StackAnswer, Vec<ThreadStack>), StackAnswerRefusal> {
    if message.len() > WORKER_ANSWER_BYTES_MAX {
        return Err(InvalidStackAnswer::TooLong(message.len()).into());
    }
    let unreadable = |error: DecodeError| InvalidStackAnswer::Unreadable(error.to_string());
    let (threads, frames) = count_threads_and_frames(message).map_err(unreadable)?;
    if threads > THREADS_MAX {
        return Err(InvalidStackAnswer::TooManyThreads(threads).into());
    }
    if frames > FRAMES_MAX {
        return Err(InvalidStackAnswer::TooManyFrames(frames).into());
    }
    let mut answer = pb::StackAnswer::decode(message).map_err(unreadable)?;
    let threads = std::mem::take(&mut answer.threads);
    let frame = |function| StackFrame { function, file: String::new(), line: 0 };
    let threads = threads.into_iter().map(|thread| ThreadStack {
        name: thread.name,
        main: thread.main,
        frames: thread.frames.into_iter().map(frame).collect(),
        frames_left_out: 0,
        for_ms: thread.for_ms,
    });
    Ok((answer, threads.collect()))
}

fn refusal_code(refusal: &StackAnswerRefusal) -> Code {
    match refusal {
        StackAnswerRefusal::NoSuchJob
        | StackAnswerRefusal::NoSuchTask(_)
        | StackAnswerRefusal::NoSuchRequest(_) => Code::NotFound,
        StackAnswerRefusal::Over(_)
        | StackAnswerRefusal::NotAsked { .. }
        | StackAnswerRefusal::WrongTicket { .. } => Code::FailedPrecondition,
        StackAnswerRefusal::AlreadyAnswered { .. } => Code::AlreadyExists,
        StackAnswerRefusal::StaleIncarnation(_) => Code::Aborted,
        StackAnswerRefusal::Invalid(InvalidStackAnswer::TooLong(_)) | StackAnswerRefusal::NoRoom => {
            Code::ResourceExhausted
        }
        StackAnswerRefusal::Invalid(_) => Code::InvalidArgument,
    }
}
