-- The runs that have dead workers: number and name of each.

local answer, is_listed = {}, {}
for _, late in ipairs(late_workers()) do
  if late.dead_in == 0 and not is_listed[late.run.number] then
    is_listed[late.run.number] = true
    answer[#answer + 1] = late.run.number .. ' ' .. late.run.name
  end
end
return answer
