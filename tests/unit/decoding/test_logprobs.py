import pytest
import torch

from outrider.core.sampling import SamplingParams
from outrider.core.speculation import VerificationRule
from outrider.core.verdict import TokenLogprobs
from outrider.decoding.logprobs import LogprobRequest, raw_logprobs
from outrider.decoding.verify import VerifyRow, verify

LOGITS = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 3


def test_values_are_raw_log_softmax_with_the_best_first() -> None:
    expected = LOGITS.double().log_softmax(1)
    requests = [LogprobRequest(row=3, token_id=17, num_top=4), LogprobRequest(row=0, token_id=2, num_top=0)]
    first, second = raw_logprobs(LOGITS, requests)
    assert first.logprob == pytest.approx(expected[3, 17].item(), abs=1e-5)
    values, ids = expected[3].topk(4)
    assert [i for i, _ in first.top] == ids.tolist()
    assert [value for _, value in first.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert second.logprob == pytest.approx(expected[0, 2].item(), abs=1e-5)
    assert second.top == ()


def test_ties_come_in_order_of_their_ids() -> None:
    row = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 0.0]])
    (entry,) = raw_logprobs(row, [LogprobRequest(row=0, token_id=5, num_top=4)])
    assert [i for i, _ in entry.top] == [1, 3, 0, 2]
    (entry,) = raw_logprobs(torch.zeros(1, 400), [LogprobRequest(row=0, token_id=5, num_top=3)])
    assert [i for i, _ in entry.top] == [0, 1, 2]


def test_no_more_than_the_vocabulary_is_reported() -> None:
    (entry,) = raw_logprobs(torch.zeros(1, 3), [LogprobRequest(row=0, token_id=1, num_top=20)])
    assert [i for i, _ in entry.top] == [0, 1, 2]


@pytest.mark.parametrize("rule", list(VerificationRule))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_block_reports_what_plain_decoding_reports(rule: VerificationRule, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=5, frequency_penalty=1.0)

    def row(prefix: list[int], draft: tuple[int, ...]) -> VerifyRow:
        return VerifyRow(
            sampling=sampling, prefix=prefix, prompt_len=0, noise_key=4, draft_token_ids=draft, rule=rule,
            num_top_logprobs=3,
        )  # fmt: skip

    plain, text = list[TokenLogprobs](), [7]
    for j in range(5):
        (verdict,) = verify(LOGITS[j : j + 1], [row(text, ())])
        plain += verdict.logprobs
        text.append(verdict.next_token_id)
    silent = VerifyRow(sampling=sampling, prefix=[7], prompt_len=0, noise_key=9, rule=rule)
    verdict, other = verify(torch.cat([LOGITS, LOGITS[:1]]), [row([7], tuple(text[1:5])), silent])
    assert other.logprobs == ()
    assert len(verdict.logprobs) == len(verdict.token_ids)
    for entry, token_id, expected, logits in zip(verdict.logprobs, verdict.token_ids, plain, LOGITS, strict=False):
        assert entry.logprob == pytest.approx(logits.log_softmax(0)[token_id].item(), abs=1e-6)
        assert [i for i, _ in entry.top] == [i for i, _ in expected.top]
        assert [v for _, v in entry.top] == pytest.approx([v for _, v in expected.top], abs=1e-6)
        if token_id == text[1 + plain.index(expected)]:
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-6)
